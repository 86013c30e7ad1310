"""The table shows for each fault whether its promise held."""

from __future__ import annotations

from typing import Literal

import pytest

from fault_table import Row, render, rows


def report(
    name: str, when: Literal["setup", "call"], outcome: Literal["passed", "failed", "skipped"], told: tuple[str, ...]
) -> pytest.TestReport:
    properties = list(zip(("fault", "promise"), told, strict=False))
    return pytest.TestReport(name, (name, 0, name), {}, outcome, None, when, duration=1.5, user_properties=properties)


def test_a_promise_holds_where_every_phase_of_its_test_does() -> None:
    told = {"a::kept": ("a kill", "goes on"), "a::broken": ("a flip", "is named"), "a::other": ()}
    phases = [report(name, "setup", "passed", words) for name, words in told.items()]
    phases += [report(name, "call", "failed" if "broken" in name else "passed", words) for name, words in told.items()]
    phases.append(report("a::no compiler", "setup", "skipped", ("a save", "is whole")))
    assert rows(phases) == [
        Row("a kill", "goes on", "held", 3.0),
        Row("a flip", "is named", "NOT HELD", 3.0),
        Row("a save", "is whole", "skipped", 1.5),
    ]


def test_the_last_line_counts() -> None:
    found = [Row("a kill", "goes on", "held", 3.0), Row("a flip", "is named", "NOT HELD", 3.0)]
    lines = render(found).splitlines()
    assert lines[-1] == "2 faults, 1 held"
    assert [line for line in lines if "a flip" in line and "NOT HELD" in line]
    assert render([*found, Row("a save", "", "skipped", 0.0)]).endswith("3 faults, 1 held, 1 skipped")
