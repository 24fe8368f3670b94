"""Disks that fail, processes that are killed, files that are damaged (reliability.md G8 to G10)."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbctl.checkpoint.reader import list_checkpoints, newest_good, open_checkpoint
from dbctl.checkpoint.writer import Writer, clean
from dbctl.errors import CheckpointError
from dbctl.region import Range
from tests.test_checkpoint import TABLE, N, facts, names, save, steps, table, vector

BIG = table([(1 << 10, 1 << 9)])  # 2 MiB
ROOT = os.geteuid() == 0


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """Memory where there is some: tests of many saves are not about the disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


def big_writer(directory: Path, step: int) -> Writer:
    return Writer(directory, step, tensors=BIG, vectors=["parameters"])


def tree(directory: Path) -> dict[str, bytes]:
    """Every file under a directory and what is in it."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# ------------------------------------------------------------------------------------- disks


@contextmanager
def tmpfs(path: Path, size: str, *, inodes: int = 0) -> Iterator[Path]:
    """`inodes`: at most; 0: any number."""
    if not ROOT:
        pytest.skip("mounting needs root")
    path.mkdir()
    options = f"size={size},nr_inodes={inodes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)  # a failed test holds files


def test_a_full_disk_is_one_error_and_changes_nothing(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "1m") as disk:
        save(disk, 100)
        before = tree(disk)
        with pytest.raises(CheckpointError, match="cannot be saved: no space left on device") as e:
            big_writer(disk, 200)
        assert "step-000000200" in str(e.value)
        assert "earlier checkpoints are untouched" in str(e.value)
        assert tree(disk) == before
        assert names(disk) == ["step-000000100"]
        save(disk, 300)  # training goes on and tries again
        assert steps(disk) == [300, 100]


@pytest.mark.parametrize("inodes", [9, 10, 11, 12])
def test_a_disk_without_inodes_is_told_as_such(tmp_path: Path, inodes: int) -> None:
    """Also where what is removed then makes some free again: bytes there are enough."""
    with tmpfs(tmp_path / "few", "1m", inodes=inodes) as disk:
        save(disk, 100)
        with pytest.raises(CheckpointError, match="cannot be saved: no inodes left on device"):
            save(disk, 200)
        assert names(disk) == ["step-000000100"]


def test_a_disk_that_fills_up_before_the_manifest_changes_nothing(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "1m") as disk:
        save(disk, 100)
        before = tree(disk)
        writer = Writer(disk, 200, tensors=TABLE, vectors=["parameters"])
        writer.put("parameters", 0, vector(0))
        filler = tmp_path / "small" / "filler"
        with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            all(file.write(bytes(4096)) for _ in itertools.count())
        with pytest.raises(CheckpointError, match="no space left on device"):
            writer.finish(facts())
        filler.unlink()
        assert tree(disk) == before


def test_a_limit_on_file_sizes_is_one_error(tmp_path: Path) -> None:
    """As a quota would be: EFBIG in place of EDQUOT, and no need to be root."""
    save(tmp_path, 100)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be saved: file too large"):
            big_writer(tmp_path, 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert names(tmp_path) == ["step-000000100"]


def test_a_disk_turned_read_only_is_one_error(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "ro", "1m") as disk:
        save(disk, 100)
        before = tree(disk)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(CheckpointError, match="cannot be saved: read-only file system"):
            save(disk, 200)
        assert tree(disk) == before
        assert newest_good(disk)[0].manifest.step == 100


@pytest.mark.parametrize("what", ["parent", "own"])
def test_a_directory_that_vanished_is_one_error_and_the_next_save_makes_it_anew(
    tmp_path: Path, what: str
) -> None:
    directory = tmp_path / "checkpoints"
    writer = Writer(directory, 1, tensors=TABLE, vectors=["parameters"])
    writer.put("parameters", 0, vector(0))
    shutil.rmtree(directory if what == "parent" else next(directory.iterdir()))
    with pytest.raises(CheckpointError, match="cannot be saved: no such file or directory"):
        writer.finish(facts())
    save(directory, 2)
    assert steps(directory) == [2]


def test_a_run_directory_that_vanished_or_is_a_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        save(tmp_path / "gone" / "checkpoints", 1)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="file exists"):
        save(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="not a directory"):
        list_checkpoints(tmp_path / "file")


# ------------------------------------------------------------------------- every system call

CALLS = ("mkdir", "open", "posix_fallocate", "pwrite", "fsync", "close", "rename")


class Fault:
    """Lets system calls of `os` pass until number `at`, then does `act` in its place, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> None:
        self.at = at
        self.act = act
        self.log: list[tuple[str, str]] = []
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            target = args[0]
            if isinstance(target, int):
                link = f"/proc/self/fd/{target}"
                target = os.readlink(link) if os.path.islink(link) else "closed"
            self.log.append((name, os.fspath(target)))
            if len(self.log) == self.at:
                if name == "close":
                    real(*args)  # close frees the descriptor whatever it reports
                self.act()
            return real(*args, **kwargs)

        return call


def fail_with(code: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


@pytest.mark.parametrize("replacing", [False, True])
def test_any_call_may_fail_and_nothing_changes(quick_path: Path, replacing: bool) -> None:
    """reliability.md section 4; a failed fsync is never tried again."""
    step = 100 if replacing else 200
    failed_calls = 0
    for at in itertools.count(1):
        directory = quick_path / str(at)
        save(directory, 100)
        before = tree(directory)
        fault, error = save_with_fault(directory, step, at)
        if len(fault.log) < at:
            break
        failed = fault.log[at - 1]
        if error:
            assert "cannot be saved: input/output error" in error
            assert tree(directory) == before, failed
            assert names(directory) == ["step-000000100"], failed
            failed_calls += 1
        else:  # the directory was there already, or the new one was safe already
            published = ("fsync", str(directory))
            assert failed == ("mkdir", str(directory)) or published in fault.log[: at - 1], failed
            assert steps(directory)[0] == step
        if failed[0] == "fsync":
            assert fault.log.count(failed) == 1, failed
    assert failed_calls > 20


def save_with_fault(directory: Path, step: int, at: int) -> tuple[Fault, str]:
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(patch, at, fail_with(errno.EIO))
        try:
            save(directory, step, seed=9, keep=1)
        except CheckpointError as error:
            return fault, str(error)
        return fault, ""


def test_the_order_of_calls_survives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """reliability.md section 4: files, manifest, directory, rename, parent, and then the oldest."""
    save(tmp_path, 100)
    fault = Fault(monkeypatch, -1, lambda: None)
    save(tmp_path, 200, keep=1)
    monkeypatch.undo()
    hidden = next(path for call, path in fault.log if call == "mkdir" and ".tmp-" in path)
    log = [(call, path.replace(hidden, "T")) for call, path in fault.log]
    data = ["model-00001-of-00001.safetensors", "model.safetensors.index.json",
            "optimizer-00001-of-00001.safetensors", "optimizer.safetensors.index.json"]  # fmt: skip
    synced = [path for call, path in log if call == "fsync"]
    assert sorted(synced[:4]) == [f"T/{name}" for name in data]
    assert synced[4:] == ["T/manifest.json", "T", str(tmp_path)]
    manifest = log.index(("fsync", "T/manifest.json"))
    assert all(log.index(("fsync", f"T/{name}")) < manifest for name in data)
    assert [call for call in log if call[0] == "pwrite"][-1] == ("pwrite", "T/manifest.json")
    published = log.index(("rename", "T"))
    assert log.index(("fsync", "T")) < published < log.index(("fsync", str(tmp_path)))
    removed = log.index(("rename", str(tmp_path / "step-000000100")))
    assert log.index(("fsync", str(tmp_path))) < removed


# ------------------------------------------------------------------------------------- kills


def in_child(work: Callable[[], None]) -> int:
    """The PID of a forked child that does `work` and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("step", [100, 200])
def test_killed_at_any_call_there_is_always_a_good_one(quick_path: Path, step: int) -> None:
    """Also while an earlier one is replaced (100) or removed (200, keep 1)."""
    for at in itertools.count(1):
        directory = quick_path / str(at)
        save(directory, 100, seed=1)

        def work(directory: Path = directory, at: int = at) -> None:
            Fault(pytest.MonkeyPatch(), at, kill_self)
            save(directory, step, seed=2, keep=1)

        _, status = os.waitpid(in_child(work), 0)
        saved, warnings = newest_good(directory)
        assert warnings == []  # what is visible is complete
        assert saved.manifest.step in (100, step)
        found = saved.read("parameters", Range(0, N))
        assert any(np.array_equal(found, vector(seed)) for seed in (1, 2))
        clean(directory)
        assert all(name.startswith("step-") for name in names(directory))
        again, warnings = newest_good(directory)
        assert warnings == []
        assert np.array_equal(again.read("parameters", Range(0, N)), found)
        if not os.WIFSIGNALED(status):
            break
    assert at > 20


def test_killed_at_random_moments_of_fifty_saves(quick_path: Path) -> None:
    """Lightning#688."""
    chance = random.Random(688)
    whole = [vector(step, BIG[0].range.stop) for step in range(3)]
    caught_in_the_act = 0
    for life in range(15):
        first = newest_good(quick_path)[0].manifest.step if life else 0

        def work(first: int = first) -> None:
            for step in range(first + 1, first + 51):
                with big_writer(quick_path, step) as writer:
                    writer.put("parameters", 0, whole[step % 3])
                    writer.finish(facts())

        if not life:
            with big_writer(quick_path, 0) as writer:
                writer.put("parameters", 0, whole[0])
                writer.finish(facts())
        pid = in_child(work)
        time.sleep(chance.uniform(0.01, 0.08))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        saved, warnings = newest_good(quick_path)
        assert warnings == []
        step = saved.manifest.step
        found = saved.read("parameters", Range(0, saved.n_elements))
        assert found.tobytes() == whole[step % 3].tobytes()
        caught_in_the_act += any(name.startswith(".") for name in names(quick_path))
        clean(quick_path)
    assert caught_in_the_act > 0
    assert step > 0
    with big_writer(quick_path, step + 1) as writer:
        writer.put("parameters", 0, whole[0])
        writer.finish(facts())
    assert steps(quick_path) == [step + 1, step, step - 1]


# ------------------------------------------------------------------------------------ damage


def test_every_flipped_bit_of_every_file_is_found(quick_path: Path) -> None:
    """Theoria#1382. Every bit of the first 16 bytes, then every 29th: each place in a byte."""
    path = save(quick_path, 1)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for bit in [*range(128), *range(128, len(good) * 8, 29)]:
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match=f"{file.name}: (is damaged|cannot be used)"):
                open_checkpoint(path)
        file.write_bytes(good)
    open_checkpoint(path)


def test_every_cut_tail_of_every_file_is_found(quick_path: Path) -> None:
    path = save(quick_path, 1)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for size in [*range(0, len(good), 11), len(good) - 1]:
            file.write_bytes(good[:size])
            with pytest.raises(CheckpointError, match=file.name):
                open_checkpoint(path)
        file.write_bytes(good + b"\0")
        with pytest.raises(CheckpointError, match=file.name):
            open_checkpoint(path)
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{file.name}: cannot be read: no such file"):
            open_checkpoint(path)
        file.mkdir()
        with pytest.raises(CheckpointError, match=file.name):
            open_checkpoint(path)
        file.rmdir()
        file.write_bytes(good)
    open_checkpoint(path)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_falls_back_to_the_newest_good_one_with_a_warning_each(tmp_path: Path) -> None:
    paths = {step: save(tmp_path, step, keep=9) for step in (1, 2, 3, 4, 5)}
    flip(paths[5] / "optimizer-00001-of-00001.safetensors")
    os.truncate(paths[4] / "model-00001-of-00001.safetensors", 17)
    shutil.rmtree(paths[3])
    paths[3].mkdir()  # emptied
    saved, warnings = newest_good(tmp_path)
    assert saved.manifest.step == 2
    assert len(warnings) == 3
    for warning, place, why in zip(
        warnings,
        ("000000005/optimizer-00001-of-00001", "000000004/model-00001-of-00001", "3/manifest.json"),
        ("is damaged: SHA-256", "is cut or damaged: 17 bytes", "cannot be read: no such file"),
        strict=True,
    ):
        assert place in warning
        assert why in warning
        assert warning.endswith("; falling back to step-000000002")


def test_a_manifest_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1) / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(CheckpointError, match="not a regular file"):
        newest_good(tmp_path)


def test_nothing_saved_and_nothing_good_are_errors(tmp_path: Path) -> None:
    for empty in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="nothing was saved") as caught:
            newest_good(empty)
        assert caught.value.exit_code == 1
    for step in (1, 2):
        flip(save(tmp_path, step) / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint is good: .*0002/model.*0001/model"):
        newest_good(tmp_path)


def test_verified_once_by_the_controller_is_not_hashed_again(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    flip(path / "model-00001-of-00001.safetensors")
    assert open_checkpoint(path, verify=False).read("sum", Range(0, N)).tobytes() == (
        vector(1).tobytes()
    )


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    saved = open_checkpoint(save(tmp_path, 1))
    file = saved.path / "model-00001-of-00001.safetensors"
    os.truncate(file, file.stat().st_size - 2)
    assert len(saved.read("parameters", Range(0, 3))) == 3
    with pytest.raises(CheckpointError, match="was cut at byte"):
        saved.read("parameters", Range(0, N))
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: no such file"):
        saved.read("parameters", Range(0, 1))


def test_only_the_bytes_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = open_checkpoint(save(tmp_path, 1), verify=False)
    real, sizes = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(len(buffer) for buffer in buffers))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    saved.read("sum", Range(20, 31))
    assert sizes == [11 * 4]
