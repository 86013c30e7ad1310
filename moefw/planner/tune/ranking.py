"""Which candidates the error of a ratio cannot tell apart, and their order. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moefw.planner.time.likeness import held_out, percent_of_alike, percent_of_lead
from moefw.planner.tune.candidates import Candidate

GIB: Final = 2**30


def tied(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that fit and that the error of a ratio cannot tell from the fastest, by memory left, then simplicity.

    Of those that do the same, such as schedules without pp, the simplest is there.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return []
    fastest = fastest_of(fitting)
    group = [candidate for candidate in fitting if percent_below_ties(candidate, fastest) <= 0]
    alike: dict[object, Candidate] = {}
    for candidate in sorted(group, key=_order):
        same = candidate.step_s, candidate.peak_bytes, tuple(candidate.sizes.items())
        alike.setdefault(same, candidate)
    return list(alike.values())


def fastest_of(candidates: Sequence[Candidate]) -> Candidate:
    """Candidate with the shortest step."""
    return min(candidates, key=lambda each: each.step_s)


def error_percent(one: Candidate, other: Candidate) -> float:
    """Percent by which the ratio of two predictions may be wrong: more where one alone is unlike published rows."""
    assert one.inputs is not None and other.inputs is not None, "both have a time"  # noqa: PT018
    return percent_of_alike(one.inputs, other.inputs, held_out())


def percent_below_ties(candidate: Candidate, fastest: Candidate) -> float:
    """Percent by which a candidate is slower than what ties with the fastest; 0 or less: it ties itself."""
    assert candidate.inputs is not None and fastest.inputs is not None, "both have a time"  # noqa: PT018
    slowest_s = fastest.step_s * (1 + percent_of_lead(fastest.inputs, candidate.inputs, held_out()) / 100)
    return 100 * (1 - slowest_s / candidate.step_s)


def _order(candidate: Candidate) -> tuple[object, ...]:
    assert candidate.left_bytes is not None, "it fits"
    return -round(candidate.left_bytes / GIB), candidate.complexity, candidate.step_s, candidate.label
