"""The skewed routing under which an assembly is measured."""

from __future__ import annotations

from moefw.compose.assembly import Assembly
from moefw.planner.skew import EVEN, largest_skew
from moefw.recording.skew import Skew


def skew_of(assembly: Assembly, factor: float | None) -> Skew | None:
    """Routing by which one rank has ``factor`` times the mean of rows, or as many as it can; None: it is even."""
    possible = EVEN if factor is None else min(factor, largest_skew(assembly))
    if possible == EVEN:
        return None
    dims = assembly.site.dims
    ranks = assembly.layout.size("ep")
    return Skew(possible, num_experts=dims.num_experts, top_k=dims.top_k, ranks=ranks)
