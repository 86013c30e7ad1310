"""The table of schedules in docs/parallel-layouts.md says what the orders do."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from moefw.compose.registry import Registry
from moefw.runtime.pipeline.timeline import idle_share, most_in_flight, timeline

PAGE = (Path(__file__).parents[2] / "docs" / "parallel-layouts.md").read_text()
IDLE = r"( \(p-1\)[^|]*| 0 )"
ROWS = re.findall(
    rf"^\| `([\w-]+)`(?: \(default\))?((?:, `merged: true`)?) \|(.*)\|{IDLE}\|(.*)\|(.*)\|.*\|$", PAGE, re.MULTILINE
)
"""Of each row: the name; not empty if passes are merged; and the cells."""


NUMBERS = ((1, 8), (2, 8), (4, 8), (4, 16))
"""Numbers of ranks and micro-batches."""


def value(formula: str, **numbers: int) -> Fraction:
    """Return the value of a formula in which products have no sign."""
    signed = re.sub(r"(?<=[\w)])(?=[a-zA-Z(])", "*", formula.replace(" ", ""))
    return Fraction(eval(re.sub(r"\d+", r"Fraction(\g<0>)", signed), {"Fraction": Fraction}, numbers))


def test_all_schedules_have_a_row() -> None:
    registry = Registry()
    registry.load_all()
    ours = {part.name for part in registry.parts() if part.kind == "pipeline" and part.distribution == "moefw"}
    assert ours == {name for name, *_ in ROWS}


@pytest.mark.parametrize(("name", "merged", "stages", "idle", "at_4_and_8", "held"), ROWS)
def test_a_row_is_that_of_the_order(name: str, merged: str, stages: str, idle: str, at_4_and_8: str, held: str) -> None:
    declaration = Registry().get("pipeline", name).declaration
    schedule = declaration(merged=True) if merged else declaration()
    tried = [(ranks, count) for ranks, count in NUMBERS if not [*schedule.check_batches(ranks, count)]]
    assert tried
    for ranks, count in tried:
        numbers = {"p": ranks, "M": count, "v": schedule.chunks}
        order = schedule.order(ranks, count)
        played = timeline(order, lambda one: Fraction(2 if one.kind == "B" else 1, schedule.chunks))
        assert idle_share(played) == [value(idle, **numbers)] * ranks
        assert [most_in_flight(entries) for entries in order] == [value(held, r=r, **numbers) for r in range(ranks)]
        if (ranks, count) == (4, 8):
            assert Fraction(at_4_and_8.strip()) == value(idle, **numbers)
