"""A static number of rows for a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from attrs import frozen

import moefw

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class Budget:
    """``rank_capacity`` times the rows of a rank under balanced load.

    Rows beyond it are dropped. ``on_overflow`` rerun reports that some were dropped, drop reports how many.
    """

    rank_capacity: float
    on_overflow: Literal["rerun", "drop"]

    @property
    def stat(self) -> str:
        """The statistic that reports dropped rows."""
        return "dropped_rows" if self.on_overflow == "drop" else "overflow"

    def rows(self, choices: int, alignment: int) -> int:
        """Number of rows, rounded up to a multiple of ``alignment``.

        ``choices``: those of the rank with the most tokens, which under balanced load are the rows of each rank.
        """
        return -(-math.ceil(self.rank_capacity * choices) // alignment) * alignment


def reported(budget: Budget | None, left_out: Tensor | None) -> Mapping[str, Tensor]:
    """Statistics of a budget, given how many rows exceeded it. Empty without a budget."""
    if budget is None or left_out is None:
        return {}
    return {budget.stat: left_out.float()}


def check_tokens(num_tokens: int, max_tokens: int) -> None:
    """Raise ContractError where a rank has more tokens than the option ``max_tokens`` allows."""
    if num_tokens > max_tokens:
        raise moefw.ContractError(
            f"a rank sends {num_tokens} tokens; max_tokens is {max_tokens}.",
            "Set max_tokens to the most tokens of any rank and micro-batch.",
        )
