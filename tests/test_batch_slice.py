"""A slice of a batch method: names and buffers, bundles counted once, their mean gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import inf
from typing import Any

import numpy as np
import pytest

from dbctl.optim.commands import GRADIENT, PARAMETERS, TRIAL, Assignment, Scalars
from dbctl.region import Range
from dbctl.roles.base import Array, Buffer, PlainBuffer
from dbctl.roles.batch_slice import BatchSlice
from dbctl.roles.handouts import Handouts
from dbctl.roles.slice import Outcome
from dbctl.wire import Peer, Position, Push
from dbctl.wire_batch import Begin, Collect, Execute
from tests.reference import mean_gradient_of

WORKER, READER, BOSS = Peer("worker-0.0", 1), Peer("evaluator-0", 1), Peer("controller", 1)
KEPT = (PARAMETERS, GRADIENT, "s0", "y0")


class Made:
    """A slice of elements 10 to 13, with what it was given."""

    def __init__(self, values: Sequence[float] = (1, 2, 3), **changes: Any) -> None:
        self.handouts = Handouts()
        self.allocated: list[Buffer] = []
        array = np.array(values, changes.pop("dtype", "f8"))
        given: dict[str, Any] = {
            "kept": KEPT,
            "decays": [(Range(0, len(array)), 0.0)],
            "version": 0,
            "state": {},
        }
        given |= changes
        self.slice = BatchSlice(
            Range(10, 10 + len(array)),
            array,
            given.pop("state"),
            allocate=self.allocate,
            handouts=self.handouts,
            **given,
        )

    def allocate(self, n_elements: int, dtype: str) -> Buffer:
        buffer = PlainBuffer(n_elements, dtype)
        buffer.array.fill(777)  # memory as it is found
        self.allocated.append(buffer)
        return buffer

    def execute(
        self,
        *assign: Assignment,
        swap: Sequence[tuple[str, str]] = (),
        rows: Sequence[str] = (),
        columns: Sequence[str] = (),
    ) -> Scalars:
        return self.slice.execute(Execute(1, assign, tuple(swap), tuple(rows), tuple(columns)))

    def begin(self, evaluation: int, *assign: Assignment, point: str = TRIAL) -> Scalars:
        return self.slice.begin(Begin(1, evaluation, assign, point))

    def collect(
        self, evaluation: int, *, examples: int = 1, rows: Sequence[str] = ()
    ) -> tuple[Scalars, list[float]]:
        command = Collect(1, evaluation, examples, GRADIENT, tuple(rows), tuple(rows))
        return self.slice.collect(command), self.read(GRADIENT)

    def read(self, name: str) -> list[float]:
        """The elements behind a name, through a cut or by a copy to a name that is in it."""
        self.execute(("s0", ((1.0, name),)))
        values: list[float] = dict(self.slice.vectors())["s0"].array.tolist()
        return values

    def held(self, reader: Peer = WORKER) -> Array:
        """What the reader has in its hands from now on."""
        buffer = self.slice.handed_to(reader.node)
        self.handouts.hand_out(reader, buffer)
        return buffer.array


def bundle(evaluation: int, index: int, gradient: Sequence[float] = (1, 1, 1)) -> Push:
    payload = np.array(gradient, "f8")
    return Push(1, 1, 10, evaluation, 1, Position(index, evaluation, index), 0, 0, payload)


def take(made: Made, *pushes: Push) -> list[Outcome]:
    return [made.slice.take(push, staleness=0) for push in pushes]


# ------------------------------------------------------------------------------------------ names


def test_a_name_that_was_never_assigned_is_zeros() -> None:
    made = Made()
    assert made.read(TRIAL) == [0, 0, 0]
    assert made.execute(rows=[PARAMETERS, "y0"], columns=[PARAMETERS, "d"]) == (14, 0, 0, 0)
    made.execute(("out", ((2.0, PARAMETERS), (5.0, "d"))))
    assert made.read("out") == [2, 4, 6]
    assert made.read("d") == [0, 0, 0]
    assert made.execute(("out", ())) == ()
    assert made.read("out") == [0, 0, 0]


def test_assignments_go_one_after_the_other_and_may_read_what_they_write() -> None:
    made = Made()
    made.execute(
        ("a", ((1.0, PARAMETERS),)),
        ("a", ((2.0, "a"), (1.0, PARAMETERS))),
        ("b", ((1.0, "a"), (-1.0, PARAMETERS))),
        ("a", ((1.0, "b"), (1.0, "a"), (1.0, "b"))),
    )
    assert made.read("b") == [2, 4, 6]
    assert made.read("a") == [7, 14, 21]
    assert made.read(PARAMETERS) == [1, 2, 3]


def test_assignments_then_swaps_then_dot_products() -> None:
    made = Made()
    answer = made.execute(
        (TRIAL, ((10.0, PARAMETERS),)),
        swap=[(TRIAL, PARAMETERS)],
        rows=[PARAMETERS, TRIAL],
        columns=[TRIAL, PARAMETERS],
    )
    assert answer == (140, 1400, 14, 140)
    assert made.read(TRIAL) == [1, 2, 3]


def test_a_swap_moves_no_element_and_takes_a_name_without_a_buffer() -> None:
    made = Made()
    before = made.slice.current
    made.execute(swap=[(PARAMETERS, "a")])
    assert made.slice.current is not before
    assert made.slice.current.array.tolist() == [0, 0, 0]
    made.execute(swap=[("a", PARAMETERS), ("b", "c"), (PARAMETERS, PARAMETERS)])
    assert made.slice.current is before
    assert made.read("b") == made.read("a") == [0, 0, 0]


def test_swapped_names_are_written_apart() -> None:
    made = Made()
    made.execute(("a", ((1.0, PARAMETERS),)), swap=[("a", PARAMETERS)])
    made.execute(("a", ((3.0, "a"),)))
    assert (made.read("a"), made.read(PARAMETERS)) == ([3, 6, 9], [1, 2, 3])


def test_the_start_is_copied_and_saved_vectors_are_there() -> None:
    values, history = np.array([1.0, 2.0]), np.array([5.0, 6.0])
    made = Made(values, state={"s0": history}, version=9)  # type: ignore[arg-type]
    assert made.slice.version == 9
    made.execute((PARAMETERS, ((2.0, PARAMETERS),)), ("s0", ((2.0, "s0"),)))
    assert (values.tolist(), history.tolist()) == ([1, 2], [5, 6])
    assert made.slice.current.array.tolist() == [2, 4]
    assert made.slice.state["s0"].tolist() == [10, 12]


# ---------------------------------------------------------------------------------------- buffers


def test_what_somebody_holds_is_not_written_and_comes_back_into_use() -> None:
    made = Made()
    held = made.held(READER)
    before = len(made.allocated)
    for factor in (2.0, 2.0, 2.0):
        made.execute((PARAMETERS, ((factor, PARAMETERS),)))
    assert held.tolist() == [1, 2, 3]
    assert made.slice.current.array.tolist() == [8, 16, 24]
    assert len(made.allocated) == before + 1, "written in place once it is in another buffer"
    made.handouts.take_back(READER, 1)
    made.execute(("a", ((1.0, PARAMETERS),)))
    assert len(made.allocated) == before + 1
    assert held.tolist() == [8, 16, 24], "the buffer that was given back is that of the new name"


def test_a_buffer_stays_held_wherever_its_name_goes() -> None:
    """The evaluator reads the accepted point while the next iteration swaps and writes."""
    made = Made()
    held = made.held(READER)
    made.execute((TRIAL, ((1.0, PARAMETERS), (1.0, PARAMETERS))), swap=[(TRIAL, PARAMETERS)])
    made.execute((TRIAL, ((9.0, PARAMETERS),)))
    made.execute((TRIAL, ((9.0, TRIAL),)), ("a", ((1.0, TRIAL),)))
    assert held.tolist() == [1, 2, 3]
    assert made.read(TRIAL) == [162, 324, 486]


def test_zeros_that_are_held_stay_zeros() -> None:
    made = Made()
    made.execute(swap=[(PARAMETERS, "a")])
    held = made.held(READER)
    made.execute((PARAMETERS, ((1.0, "a"),)), ("c", ((1.0, "a"),)))
    assert held.tolist() == [0, 0, 0]


def test_buffers_do_not_grow_with_the_iterations() -> None:
    """One slow reader at a time; what it held is used again."""
    made = Made()
    counts = []
    for iteration in range(1, 30):
        made.begin(iteration, (TRIAL, ((1.0, PARAMETERS), (1.0, "d"))))
        made.held(WORKER)
        take(made, bundle(iteration, 0))
        made.collect(iteration)
        made.execute(("d", ((-1.0, GRADIENT),)), swap=[(PARAMETERS, TRIAL)])
        made.held(READER)
        made.handouts.take_back(READER, iteration - 1)
        made.handouts.take_back(WORKER, iteration - 1)
        counts.append(len(made.allocated))
    assert counts[-1] == counts[3] <= 9, counts


# --------------------------------------------------------------------- the point of an evaluation


def test_workers_get_the_point_and_other_readers_the_parameters() -> None:
    made = Made()
    assert made.held(WORKER).tolist() == [1, 2, 3], "before the first evaluation"
    assert made.begin(4, (TRIAL, ((10.0, PARAMETERS),))) == ()
    assert made.slice.version == 4
    assert made.held(WORKER).tolist() == [10, 20, 30]
    assert made.held(READER).tolist() == [1, 2, 3]


def test_the_point_is_that_of_begin_until_the_next_one() -> None:
    """A worker that fetches late must get what the others got, whatever the names mean by then."""
    made = Made()
    made.begin(1, (TRIAL, ((10.0, PARAMETERS),)))
    made.execute((TRIAL, ((0.0, TRIAL),)))
    assert made.held(WORKER).tolist() == [10, 20, 30]
    assert made.read(TRIAL) == [0, 0, 0]
    made.execute(swap=[(TRIAL, PARAMETERS)])
    assert made.held(WORKER).tolist() == [10, 20, 30]
    made.begin(2, point=PARAMETERS)
    assert made.held(WORKER).tolist() == [0, 0, 0]


def test_the_next_trial_point_is_written_where_the_last_one_was() -> None:
    made = Made()
    made.begin(1, (TRIAL, ((10.0, PARAMETERS),)))
    before, first = len(made.allocated), made.slice.handed_to(WORKER.node)
    made.begin(2, (TRIAL, ((5.0, PARAMETERS),)))
    assert made.slice.handed_to(WORKER.node) is first
    made.held(WORKER)
    made.begin(3, (TRIAL, ((2.0, PARAMETERS),)))
    assert made.slice.handed_to(WORKER.node) is not first
    assert first.array.tolist() == [5, 10, 15]
    assert len(made.allocated) == before + 1


# ---------------------------------------------------------------------------------------- bundles


def test_each_bundle_of_the_evaluation_in_hand_is_counted_once() -> None:
    """Paper A, section 4.2: of copies of a portion the first counts, the others are dropped."""
    made = Made()
    assert take(made, bundle(1, 0)) == [Outcome.DROPPED], "nothing was begun"
    made.begin(1)
    pushes = [bundle(1, 0), bundle(1, 1, [10, 0, 0]), bundle(1, 0), bundle(0, 2), bundle(2, 3)]
    kinds = [Outcome.APPLIED, Outcome.APPLIED, Outcome.DROPPED, Outcome.DROPPED, Outcome.DROPPED]
    assert take(made, *pushes) == kinds
    answer, gradient = made.collect(1, examples=2)
    assert answer == (0.0,)
    assert gradient == [5.5, 0.5, 0.5]
    assert take(made, bundle(1, 7), bundle(1, 0)) == [Outcome.DROPPED] * 2, "it is over"


def test_an_evaluation_begins_with_nothing() -> None:
    made = Made()
    made.begin(1)
    take(made, bundle(1, 0), bundle(1, 1, [np.nan] * 3))
    made.begin(2)
    assert take(made, bundle(1, 2)) == [Outcome.DROPPED]
    assert take(made, bundle(2, 0, [3, 4, 5])) == [Outcome.APPLIED]
    assert made.collect(2) == ((0.0,), [3, 4, 5])


def test_in_float32_the_order_of_arrival_does_not_show() -> None:
    gradients = [[1e8, 1.5, 3e-7], [-1e8, 1e-7, 1], [3.25, -1.5, 1e-7], [1e-3, 0.1, 0.2]]
    found = set()
    for order in permutations(range(4)):
        made = Made(dtype="f4")
        made.begin(1)
        for i in order:
            push = bundle(1, i)
            payload = np.array(gradients[i], "f4")
            made.slice.take(Push(1, 1, 10, 1, 1, push.position, 0, 0, payload), staleness=0)
        found.add(tuple(made.collect(1, examples=3)[1]))
    assert len(found) == 1


def test_a_bundle_that_is_not_finite_is_refused_and_spoils_its_evaluation() -> None:
    """The gradient without it would look right and be wrong."""
    made = Made()
    made.begin(1)
    bad = bundle(1, 1, [0, inf, 0])
    assert take(made, bundle(1, 0), bad) == [Outcome.APPLIED, Outcome.REFUSED]
    answer, gradient = made.collect(1)
    assert answer == (inf,)
    assert gradient == [1, 1, 1]
    made.begin(2)
    assert take(made, bundle(2, 1)) == [Outcome.APPLIED]
    assert made.collect(2)[0] == (0.0,)


def test_a_finite_copy_of_a_refused_bundle_counts() -> None:
    made = Made()
    made.begin(1)
    bad = bundle(1, 0, [0, np.nan, 0])
    assert take(made, bad, bundle(1, 0), bad) == [
        Outcome.REFUSED,
        Outcome.APPLIED,
        Outcome.DROPPED,
    ]
    assert made.collect(1) == ((0.0,), [1, 1, 1])


def test_sums_that_are_not_finite_in_the_vectors_dtype_are_told() -> None:
    made = Made(dtype="f4")
    made.begin(1)
    for index in range(4):
        assert take(made, bundle(1, index, [0, 3e38, 0])) == [Outcome.APPLIED]
    answer, _ = made.collect(1, examples=1, rows=[PARAMETERS])
    assert answer == (inf, 14)
    made.begin(2)
    take(made, *[bundle(2, index, [0, 3e38, 0]) for index in range(4)])
    assert made.collect(2, examples=4)[0] == (0.0,), "the mean is a float32"


def test_the_mean_gradient_with_decay_is_the_slow_twins() -> None:
    """L2 is for weights and not for biases, at the point of the evaluation."""
    decays = [(Range(0, 1), 0.5), (Range(1, 2), 0.0), (Range(2, 3), 0.25)]
    made = Made(decays=decays)
    made.begin(1, (TRIAL, ((3.0, PARAMETERS),)))
    take(made, bundle(1, 0, [1, 2, 3]), bundle(1, 1, [5, 5, 5]))
    made.execute(("d", ((1.0, TRIAL),)))
    (penalty, dot), gradient = made.collect(1, examples=4, rows=[GRADIENT])
    expected, its_penalty = mean_gradient_of(
        np.array([6.0, 7, 8]), np.array([3.0, 6, 9]), examples=4, decays=decays
    )
    assert gradient == expected.tolist() == [3, 1.75, 4.25]
    assert penalty == its_penalty == 0.25 * 9 + 0.125 * 81
    assert dot == 3**2 + 1.75**2 + 4.25**2


def test_a_gradient_may_be_written_where_a_cut_still_reads_the_last_one() -> None:
    made = Made()
    made.begin(1)
    take(made, bundle(1, 0))
    made.collect(1)
    held = dict(made.slice.vectors())[GRADIENT]
    made.handouts.hand_out(BOSS, held.buffer)
    made.begin(2)
    take(made, bundle(2, 0, [4, 4, 4]))
    assert made.collect(2)[1] == [4, 4, 4]
    assert held.array.tolist() == [1, 1, 1]


@pytest.mark.parametrize("evaluation", [0, 1, 3])
def test_only_the_evaluation_in_hand_is_collected(evaluation: int) -> None:
    made = Made()
    made.begin(2)
    with pytest.raises(AssertionError, match="in hand 2"):
        made.collect(evaluation)
    made.collect(2)
    with pytest.raises(AssertionError, match="expected an evaluation in hand"):
        made.collect(2)


def test_a_push_fits_if_it_is_the_whole_slice() -> None:
    made = Made()
    assert made.slice.fits(bundle(1, 0))
    assert not made.slice.fits(bundle(1, 0, [1, 1]))
    assert made.slice.ready


# ------------------------------------------------------------------------------------------- cuts


def test_a_cut_is_the_kept_vectors_as_they_lie() -> None:
    made = Made()
    made.execute(("y0", ((2.0, PARAMETERS),)), ("a", ((3.0, PARAMETERS),)))
    n = len(made.allocated)
    found = made.slice.vectors()
    assert [name for name, _ in found] == list(KEPT)
    assert [view.array.tolist() for _, view in found] == [[1, 2, 3], [0] * 3, [0] * 3, [2, 4, 6]]
    assert found[0][1].buffer is made.slice.current, "no copy"
    assert len(made.allocated) == n + 1, "zeros are made once"
    assert list(made.slice.state) == list(KEPT[1:])


def test_what_is_saved_does_not_change_while_the_next_iterations_write() -> None:
    made = Made()
    made.execute(("s0", ((1.0, PARAMETERS),)), ("y0", ((2.0, PARAMETERS),)))
    found = made.slice.vectors()
    for _, view in found:
        made.handouts.hand_out(BOSS, view.buffer)
    before = [view.array.copy().tolist() for _, view in found]
    for evaluation in (1, 2, 3):
        made.begin(evaluation, (TRIAL, ((2.0, PARAMETERS),)))
        take(made, bundle(evaluation, 0))
        made.collect(evaluation)
        made.execute(
            ("s0", ((1.0, TRIAL), (-1.0, PARAMETERS))),
            ("y0", ((3.0, GRADIENT),)),
            swap=[(TRIAL, PARAMETERS)],
        )
    assert [view.array.tolist() for _, view in found] == before
    assert made.slice.current.array.tolist() == [8, 16, 24]
    n = len(made.allocated)
    made.handouts.take_back_all(BOSS)
    for name in "abc":  # GRADIENT was not assigned when the cut was made
        made.execute((name, ((1.0, PARAMETERS),)))
    assert len(made.allocated) == n, "what came back is used again"
