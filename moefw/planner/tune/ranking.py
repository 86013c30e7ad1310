"""Which candidates the error of a ratio cannot tell apart, and their order. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from math import ceil, exp, log
from statistics import mean
from typing import Final

from attrs import frozen

from moefw.planner.time.likeness import LEAST, held_out
from moefw.planner.tune.candidates import Candidate

SHARE: Final = 0.8
"""Share of pairs of layouts whose ratio of errors lies inside :func:`error_of_ratio`."""
ALIKE: Final = ("implementation", "cluster", "precision", "graphs", "ep_overlap", "gpus", "hidden")
"""Inputs that two layouts share if they are of one model, machine and software, as candidates are."""
GIB: Final = 2**30


@frozen
class ErrorOfRatio:
    """How wrong the ratio of two predictions may be, a share, from so many pairs of published layouts."""

    share: float
    pairs: int


@cache
def error_of_ratio() -> ErrorOfRatio:
    """Error of the ratio of two layouts of one model, machine and software: of published ones, held out by model.

    What both predictions have wrong cancels. :data:`SHARE` of the pairs lie inside; it is never less than rows of one
    layout differ from release to release.
    """
    layouts: dict[object, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in held_out():
        experts = row.inputs.experts_a_rank * row.inputs.ep
        alike = (experts, *(getattr(row.inputs, name) for name in ALIKE))
        layouts[alike][row.layout].append(log(1 + row.error))
    differences = sorted(
        abs(one - other)
        for of_model in layouts.values()
        for one, other in combinations([mean(errors) for errors in of_model.values()], 2)
    )
    inside = differences[min(len(differences) - 1, ceil(SHARE * len(differences)) - 1)]
    return ErrorOfRatio(max(LEAST / 100, exp(inside) - 1), len(differences))


def tied(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that fit and that the error of a ratio cannot tell from the fastest, by memory left, then simplicity.

    Of those that do the same, such as schedules without pp, the simplest is there.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return []
    fastest = min(candidate.step_s for candidate in fitting)
    group = [candidate for candidate in fitting if candidate.step_s <= fastest * (1 + error_of_ratio().share)]
    alike: dict[object, Candidate] = {}
    for candidate in sorted(group, key=_order):
        same = candidate.step_s, candidate.peak_bytes, tuple(candidate.sizes.items())
        alike.setdefault(same, candidate)
    return list(alike.values())


def _order(candidate: Candidate) -> tuple[object, ...]:
    assert candidate.left_bytes is not None, "it fits"
    return -round(candidate.left_bytes / GIB), candidate.complexity, candidate.step_s, candidate.label
