"""Why other candidates lose, and by what; and what would fit where nothing does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from attrs import evolve

from moefw.core.errors import PlanError, Problem
from moefw.planner.cluster import GIB
from moefw.planner.tune.candidates import Candidate
from moefw.planner.tune.ranking import error_percent
from moefw.planner.tune.search import Search

TOLD_EACH: Final = ("precision",)
"""Axes of few values, each of which may be out for a reason of its own."""
REMEDIES: Final = 4
"""Sets of policies that are tried beside known ones for a faster candidate that does not fit."""
NEAREST: Final = 4
"""Candidates that miss least and that are tried on more GPUs."""
TIMES: Final = (2, 4, 8, 16, 32)
"""Multiples of the GPUs that are tried where nothing fits."""


def reasons(search: Search, best: Candidate) -> Iterator[str]:
    """Yield why the best other candidate a step away on each axis is not the best one, and why others are none."""
    by_axis: dict[str, list[Candidate]] = {}
    for axis, settings in search.steps_from(best.settings):
        known = search.known_at(settings)
        if known is not None:
            by_axis.setdefault(axis.name, []).append(known)
    for name, candidates in by_axis.items():
        measured = [candidate for candidate in candidates if candidate.step is not None]
        if measured:
            yield f"{name}: {_why(search, min(measured, key=lambda each: each.step_s), best)}"
        out = [candidate for candidate in candidates if candidate.problems]
        told = out if name in TOLD_EACH else out[:1]
        for candidate in told:
            more = f" and {len(out) - 1} more" if len(out) > len(told) else ""
            yield f"{name}: not {difference(search, candidate, best)}{more}: {candidate.problems[0]}"


def difference(search: Search, candidate: Candidate, best: Candidate) -> str:
    """What a candidate has and the best one has not, in words."""
    words = [axis.at(candidate.settings) for axis in search.space.axes]
    own = [axis.at(best.settings) for axis in search.space.axes]
    return ", ".join(value.label for value, other in zip(words, own, strict=True) if value and value != other)


def _why(search: Search, candidate: Candidate, best: Candidate) -> str:
    """Why a candidate is not the best one."""
    what = difference(search, candidate, best)
    ratio = candidate.step_s / best.step_s - 1
    error = error_percent(candidate, best) / 100
    speed = f"{100 * abs(ratio):.0f} ± {100 * error:.0f} % {'slower' if ratio > 0 else 'faster'}"
    if not candidate.fits:
        missing = f"misses by {candidate.missing_bytes / GIB:.1f} GiB at position {candidate.position + 1} on pp"
        return f"{what} would be {speed} and {missing}: {_remedy(search, candidate, best)}"
    if abs(ratio) <= error:
        left = (candidate.left_bytes or 0) - (best.left_bytes or 0)
        return f"{what} is tied ({speed}), with {abs(left) / GIB:.1f} GiB {'more' if left > 0 else 'less'} left"
    return f"{what} is {speed}: {_costs(candidate, best)}"


def _costs(candidate: Candidate, best: Candidate) -> str:
    """The category that makes the largest difference to the step."""
    assert candidate.step is not None and best.step is not None, "both have a time"  # noqa: PT018
    own, other = candidate.step.added_s, best.step.added_s
    changes = {name: own.get(name, 0.0) - other.get(name, 0.0) for name in {*own, *other}}
    slower = candidate.step_s > best.step_s
    name = (max if slower else min)(sorted(changes), key=lambda each: changes[each])
    return f"{name} {changes[name]:+.2f} s"


def _remedy(search: Search, candidate: Candidate, best: Candidate) -> str:
    """The fastest set of policies with which a candidate fits, of known ones and of a few more."""
    steps = [settings for axis, settings in search.space.steps_from(candidate.settings) if axis.kind == "memory"]
    known = [found for settings in steps if (found := search.known_at(settings)) is not None]
    fitting = [found for found in known if found.fits]
    if not fitting:
        unknown = [settings for settings in steps if search.known_at(settings) is None]
        fitting = [found for found in map(search.look, unknown[:REMEDIES]) if found.fits]
    if not fitting:
        return "no single policy that was tried makes it fit"
    fastest = min(fitting, key=lambda each: each.step_s)
    ratio = fastest.step_s / best.step_s - 1
    speed = f"{100 * abs(ratio):.0f} % {'slower' if ratio > 0 else 'faster'} than the best"
    return f"with {difference(search, fastest, candidate)} it fits, and is {speed}"


def impossible(search: Search) -> PlanError:
    """Error of a search in which nothing fits: every reason, counted, and the nearest thing that fits."""
    known = [*search.known.values()]
    counted = Counter(problem for candidate in known for problem in candidate.problems)
    problems = [Problem(f"{number} of {len(known)} candidates: {what}") for what, number in counted.most_common()]
    measured = sorted(search.candidates, key=lambda each: each.missing_bytes)
    if not measured:
        return PlanError([Problem("no candidate is possible.", "Change what is said below."), *problems])
    nearest = measured[0]
    if search.nothing_can_fit:
        needed = -(-search.least_bytes * search.where.world // search.where.cluster.memory_bytes)
        what = (
            f"parameters and gradients take {search.least_bytes / GIB:.1f} GiB of each of {search.where.world} GPUs at "
            f"least, if each holds a part of all, and a GPU of {search.where.name} has "
            f"{search.where.cluster.memory_bytes / GIB:.1f}."
        )
        return PlanError([Problem(what, f"Use more than {needed} GPUs, GPUs with more memory, or a smaller model.")])
    what = (
        f"none of {len(known)} candidates fits a GPU of {search.where.name}; the nearest misses by "
        f"{nearest.missing_bytes / GIB:.1f} GiB at position {nearest.position + 1} on pp: {nearest.label}."
    )
    return PlanError([Problem(what, _on_more(search, measured[:NEAREST])), *problems])


def _on_more(search: Search, nearest: Sequence[Candidate]) -> str:
    """On how many GPUs one of the nearest candidates fits."""
    for times in TIMES:
        where = evolve(search.where, world=times * search.where.world)
        larger = Search(search.space, where, search.resolve, search.excerpts)
        fitting = [found for found in (larger.look(each.settings) for each in nearest) if found.fits]
        if fitting:
            return f"On {where.world} GPUs this fits: {fitting[0].label}."
    return "Use GPUs with more memory, a smaller model, or let more vary."
