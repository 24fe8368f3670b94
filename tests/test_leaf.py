"""Single values of an experiment file: what may stand where, and that the schema says the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from dbctl.experiment import leaf
from tests.test_experiment import fits

PAIR = Annotated[int, Ge(1)] | tuple[Annotated[int, Ge(1)], Annotated[int, Ge(1)]] | None
HALF = Literal["auto"] | Annotated[float, Gt(0), Le(0.5)]


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (PAIR, [3, [1, 2], None], [0, 1.0, True, "3", [1], [1, 2, 3], [0, 1], [1, True], [1, 2.0]]),
        (HALF, [0.5, 0.1, "auto"], [1, 0, 0.6, "0.1", "Auto", False, None, [0.1]]),
        (Annotated[float, Ge(0)], [0, 1, 2.5], [-1, "1", True, None]),
        (Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)], [[1], [1, 2]], [[], [0], 1]),
        (Annotated[str, MinLen(1), MaxLen(2)], ["a", "ab"], ["", "abc", 1, None]),
        (bool, [True, False], [0, 1, "true", None]),
    ],
)
def test_a_single_value_is_judged_strictly_and_the_schema_agrees(
    annotation: Any, good: list[Any], bad: list[Any]
) -> None:
    rule = {"anyOf": leaf.json_schemas(annotation)}
    for value in good:
        expected = tuple(value) if isinstance(value, list) else value
        assert leaf.judge(annotation, value) == expected
        assert fits(value, rule), value
    for value in bad:
        with pytest.raises(ValueError, match="is not"):
            leaf.judge(annotation, value)
        whole = ".0" in str(value)  # an integer in a schema
        assert whole or not fits(value, rule), value


def test_a_number_that_may_be_whole_is_the_float_that_it_stands_for() -> None:
    assert type(leaf.judge(Annotated[float, Ge(0)], 1)) is float
