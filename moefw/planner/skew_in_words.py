"""What a plan of skewed routing tells beside its tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from moefw.compose.assembly import Assembly
from moefw.planner.report import Ledger
from moefw.planner.sheets import unit_of
from moefw.planner.skew import EVEN, largest_skew, runs_again


def in_words(assembly: Assembly, plan: Ledger, asked: float) -> Iterator[str]:
    """Yield what a plan with so many times the mean of rows tells; nothing if its routing is even."""
    if plan.skew is None or plan.unknown:
        return
    if plan.skew > EVEN:
        yield from _of_plan(plan)
    if plan.skew < asked:
        yield f"--skew {asked:g}: {_why_no_more(assembly, plan.skew)}"
    yield from _bounds(assembly, plan.skew)


def _of_plan(plan: Ledger) -> Iterator[str]:
    """Yield what of a plan is of skewed routing, and how much of the peak is for that."""
    unit, name = unit_of(plan)
    more = ((plan.peak_bytes or 0) - (plan.even_peak_bytes or 0)) / unit
    rank = f"a rank with {plan.skew:g} times the mean of rows in every layer"
    yield f"the memory is that of {rank}: its peak is {more:.3f} {name} more than with even routing"
    yield "work and what is sent are those of even routing"


def _why_no_more(assembly: Assembly, skew: float) -> str:
    """Why no rank has as many rows as were asked for."""
    if not assembly.layers:
        return "the model has no experts"
    if assembly.layout.size("ep") == 1:
        return "all ranks hold all experts, so that each has the rows of its own tokens"
    if skew < largest_skew(assembly):
        name = assembly.parts.routing.name
        return f"{name} does not choose experts by scores, so that ranks have the rows that it gives them"
    return f"no rank can have more than {skew:g} times the mean of rows, as a token goes to an expert once"


def _bounds(assembly: Assembly, skew: float) -> Iterator[str]:
    """Yield what keeps rows from growing with the skew."""
    capacity = getattr(getattr(assembly.parts.routing, "capacity", None), "factor", None)
    if capacity is not None and skew > capacity:
        yield f"the router drops what an expert gets beyond {capacity:g} times the mean, so more changes no memory"
    static = getattr(assembly.parts.dispatch, "rank_capacity", None)
    if runs_again(assembly, skew):
        yield (
            f"a rank has room for {static:g} times the mean of rows (rank_capacity): each step with more runs again "
            "without this budget, and then needs the peak above"
        )
    elif static is not None:
        yield f"a rank has {static:g} times the mean of rows however routing is skewed: they are static (rank_capacity)"
