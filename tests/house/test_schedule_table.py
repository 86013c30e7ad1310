"""The table of schedules in docs/parallel-layouts.md says what the orders do."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from moefw.compose.registry import Registry
from moefw.runtime.pipeline.timeline import idle_share, most_in_flight, timeline

PAGE = (Path(__file__).parents[2] / "docs" / "parallel-layouts.md").read_text()
ROWS = dict(re.findall(r"^\| `([\w-]+)`(?: \(default\))? \|(.*\d/\d\d \|.*)\|$", PAGE, flags=re.MULTILINE))


def value(formula: str, **numbers: int) -> Fraction:
    """Return the value of a formula in which products have no sign."""
    signed = re.sub(r"(?<=[\w)])(?=[a-zA-Z(])", "*", formula.replace(" ", ""))
    return Fraction(eval(re.sub(r"\d+", r"Fraction(\g<0>)", signed), {"Fraction": Fraction}, numbers))


def test_all_schedules_have_a_row() -> None:
    registry = Registry()
    registry.load_all()
    ours = {part.name for part in registry.parts() if part.kind == "pipeline" and part.distribution == "moefw"}
    assert ours == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_that_of_the_order(name: str) -> None:
    _, idle, at_4_and_8, held, _ = (cell.strip() for cell in ROWS[name].split("|"))
    schedule = Registry().get("pipeline", name).declaration()
    for ranks, count in ((2, 8), (4, 8), (4, 16)):
        numbers = {"p": ranks, "M": count, "v": schedule.chunks}
        order = schedule.order(ranks, count)
        played = timeline(order, lambda one: Fraction(2 if one.kind == "B" else 1, schedule.chunks))
        assert idle_share(played) == [value(idle, **numbers)] * ranks
        assert [most_in_flight(actions) for actions in order] == [value(held, r=r, **numbers) for r in range(ranks)]
        if (ranks, count) == (4, 8):
            assert Fraction(at_4_and_8) == value(idle, **numbers)
