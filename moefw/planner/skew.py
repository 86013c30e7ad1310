"""Routing that is not even: how many rows a rank can have, and whether a step has room for them. Imports no torch."""

from __future__ import annotations

from typing import Final

from moefw.compose.assembly import Assembly

EVEN: Final = 1.0
"""Rows of the rank with most, beside the mean, where all ranks have equally many."""


def largest_skew(assembly: Assembly) -> float:
    """The most rows that a rank can have, beside the mean: a token goes to K experts, and to each of them once."""
    dims = assembly.site.dims
    ranks = assembly.layout.size("ep")
    if not assembly.layers:
        return EVEN
    return min(dims.top_k, dims.num_experts // ranks) * ranks / dims.top_k


def room_for_rows(assembly: Assembly) -> float | None:
    """Static rows of a rank, beside the mean, beyond which a step runs again; None: it has room for all."""
    budgets = [least for layer in assembly.layers.values() for least in layer.facts.get("budget", ())]
    return min(budgets, default=None)


def runs_again(assembly: Assembly, factor: float | None) -> bool:
    """Whether ``factor`` times the mean of rows are more than a budget, without which the step then runs again."""
    room = room_for_rows(assembly)
    return factor is not None and room is not None and factor > room
