"""Which candidates the error of a ratio cannot tell apart, and their order. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moefw.planner.time.likeness import error_of_ratio, held_out
from moefw.planner.tune.candidates import Candidate

GIB: Final = 2**30


def tied(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that fit and that the error of a ratio cannot tell from the fastest, by memory left, then simplicity.

    Of those that do the same, such as schedules without pp, the simplest is there.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return []
    fastest = min(candidate.step_s for candidate in fitting)
    group = [candidate for candidate in fitting if candidate.step_s <= fastest * (1 + error_of_ratio(held_out()).share)]
    alike: dict[object, Candidate] = {}
    for candidate in sorted(group, key=_order):
        same = candidate.step_s, candidate.peak_bytes, tuple(candidate.sizes.items())
        alike.setdefault(same, candidate)
    return list(alike.values())


def _order(candidate: Candidate) -> tuple[object, ...]:
    assert candidate.left_bytes is not None, "it fits"
    return -round(candidate.left_bytes / GIB), candidate.complexity, candidate.step_s, candidate.label
