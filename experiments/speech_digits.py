"""Spoken digits as frames for speech-digits.yaml, and a vote over the frames of each recording.

    python experiments/speech_digits.py frames RECORDINGS.npz [--out DIRECTORY]
    dbctl train experiments/speech-digits.yaml --run-dir runs/speech
    dbctl eval runs/speech --predictions frames.csv
    python experiments/speech_digits.py vote frames.csv [--out DIRECTORY]

The recordings are those of the Free Spoken Digit Dataset, by Zohar Jackson and contributors,
https://github.com/Jakobovski/free-spoken-digit-dataset, licence CC BY-SA 4.0: WAV files named
recordings/DIGIT_SPEAKER_INDEX.wav, one channel, 8 kHz, 16 bits. They are not shipped with dbctl.
Its official test set is index 0 to 4. Put them, in any order, into RECORDINGS.npz as

    audio    int16, (samples of all,): the recordings end to end
    length   whole numbers, (recordings,): samples of each
    digit    whole numbers, (recordings,): 0 to 9, the first part of each name
    index    whole numbers, (recordings,): the last part of each name

As in Dean et al. 2012, section 5, a row is 11 frames of 40 log-energies: frames of 25 ms every
10 ms, triangular filters evenly spaced in mel, each recording's mean subtracted; the label is the
digit. At both ends of a recording its first and last frame are repeated.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERTZ = 8000
FRAME, HOP, FFT = 200, 80, 512  # samples: 25 ms, 10 ms
FILTERS, CONTEXT = 40, 11
TEST_INDICES = range(5)
FLOOR = 1.0  # added to the energies: int16 silence is 0


def filters() -> NDArray[np.float64]:
    """(FILTERS, FFT // 2 + 1): triangles over frequencies, their corners evenly spaced in mel."""
    mel_of = 2595 * np.log10(1 + np.array([60.0, HERTZ / 2]) / 700)
    corners = 700 * (10 ** (np.linspace(*mel_of, FILTERS + 2) / 2595) - 1)
    hertz = np.fft.rfftfreq(FFT, 1 / HERTZ)
    rising = (hertz - corners[:-2, None]) / np.diff(corners)[:-1, None]
    falling = (corners[2:, None] - hertz) / np.diff(corners)[1:, None]
    return np.clip(np.minimum(rising, falling), 0, None)


def log_energies(audio: NDArray[np.int16]) -> NDArray[np.float32]:
    """(frames, FILTERS) of one recording; at least one frame, the last one filled with silence."""
    n_frames = 1 + max(0, -(-(len(audio) - FRAME) // HOP))
    padded = np.zeros((n_frames - 1) * HOP + FRAME)
    padded[: len(audio)] = audio
    windows = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP]
    spectrum = np.abs(np.fft.rfft(windows * np.hamming(FRAME), FFT)) ** 2
    energies = np.log(spectrum @ filters().T + FLOOR)
    return (energies - energies.mean(axis=0)).astype(np.float32)


def with_context(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """(frames, CONTEXT x FILTERS): each frame between the five before and the five after it."""
    half = CONTEXT // 2
    around = np.arange(len(frames))[:, None] + np.arange(-half, half + 1)
    return frames[np.clip(around, 0, len(frames) - 1)].reshape(len(frames), -1)


def write_frames(recordings: Path, out: Path) -> None:
    """x, y and the number of the recording of each frame, as .npy files, of both splits."""
    with np.load(recordings) as file:
        audio, length, digit, index = (file[k] for k in ("audio", "length", "digit", "index"))
    clips = np.split(audio, np.cumsum(length)[:-1])
    is_test = np.isin(index, TEST_INDICES)
    out.mkdir(parents=True, exist_ok=True)
    for split, chosen in (("train", ~is_test), ("test", is_test)):
        numbers = np.flatnonzero(chosen)
        rows = [with_context(log_energies(clips[number])) for number in numbers]
        counts = [len(part) for part in rows]
        np.save(out / f"x-{split}.npy", np.concatenate(rows))
        np.save(out / f"y-{split}.npy", np.repeat(digit[numbers].astype(np.int64), counts))
        np.save(out / f"recording-{split}.npy", np.repeat(numbers, counts))
        print(f"{split}: {len(numbers):,} recordings, {sum(counts):,} frames")


def vote(predictions: Path, out: Path) -> float:
    """The share of the test recordings whose frames' scores, by predicted digit, say its digit."""
    with predictions.open(newline="") as file:
        rows = [
            (int(r["row"]), int(r["predicted"]), float(r["score"])) for r in csv.DictReader(file)
        ]
    row, predicted, score = (np.array(column) for column in zip(*rows, strict=True))
    recording, y = np.load(out / "recording-test.npy"), np.load(out / "y-test.npy")
    if len(row) != len(y) or len(set(row)) != len(y):
        raise SystemExit(f"{predictions} has {len(row)} rows, {out} has {len(y)} frames")
    numbers, first, place = np.unique(recording, return_index=True, return_inverse=True)
    votes = np.zeros((len(numbers), 10))
    np.add.at(votes, (place[row], predicted), score)
    right = votes.argmax(axis=1) == y[first]
    print(f"{right.sum()} of {len(right)} recordings, {right.mean():.2%}")
    return float(right.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["frames", "vote"])
    parser.add_argument("file", type=Path)
    default = Path(__file__).parent / "speech-digits"
    parser.add_argument("--out", type=Path, default=default, help="where the frames are")
    arguments = parser.parse_args()
    if arguments.what == "frames":
        write_frames(arguments.file, arguments.out)
    else:
        vote(arguments.file, arguments.out)


if __name__ == "__main__":
    main()
