"""A goal beside its measurement, and the table of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Goal = Mapping[str, Any]


def at_least(what: str, measured: float | None, wanted: float) -> Goal:
    """Return a goal that is met from ``wanted`` on. ``measured`` None: it was not measured."""
    return _goal(what, measured, ">=", wanted, None if measured is None else measured >= wanted)


def at_most(what: str, measured: float | None, wanted: float) -> Goal:
    """Return a goal that is met up to ``wanted``. ``measured`` None: it was not measured."""
    return _goal(what, measured, "<=", wanted, None if measured is None else measured <= wanted)


def _goal(what: str, measured: float | None, sign: str, wanted: float, met: bool | None) -> Goal:
    rounded = None if measured is None else float(f"{measured:.4g}")
    return {"what": what, "measured": rounded, "wanted": f"{sign} {wanted:g}", "met": met}


def table(goals: Iterable[Goal]) -> str:
    """Return a line for each goal."""
    said = {True: "met", False: "missed", None: "not measured"}
    lines = [f"{'goal':64} {'measured':>9}  {'wanted':9}"]
    for goal in goals:
        measured = "-" if goal["measured"] is None else f"{goal['measured']:.3g}"
        lines.append(f"{goal['what']:64} {measured:>9}  {goal['wanted']:9} {said[goal['met']]}")
    return "\n".join(lines)
