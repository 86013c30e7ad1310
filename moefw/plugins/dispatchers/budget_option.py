"""Options of built-in dispatchers that can give a rank a static number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import gt, optional

import moefw
from moefw.core.site import Site
from moefw.plugins.dispatchers.wire_option import SendsRows

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
        """Return the number of rows, given the choices of the rank with the most tokens, rounded up to alignment."""
        return -(-math.ceil(self.rank_capacity * choices) // alignment) * alignment


@frozen(kw_only=True, slots=False)  # with slots it could not be a base beside another class of options
class SetsBudget(SendsRows):
    """``rank_capacity``: the static number of rows of a rank, as a multiple of its fair share; null: room for all rows.

    Rows beyond it: ``on_overflow`` rerun runs the step again without the budget, drop drops them.
    """

    rank_capacity: float | None = field(default=None, validator=optional(gt(0.0)))
    on_overflow: Literal["rerun", "drop"] | None = None

    @property
    def budget(self) -> Budget | None:
        """The row budget of a rank; None: room for all rows."""
        return Budget(self.rank_capacity, self.on_overflow) if self.rank_capacity and self.on_overflow else None

    def alone(self, context: moefw.BuildContext, **more: Any) -> moefw.Dispatcher:
        """Return the dispatcher of a process that holds all experts, with its budget."""
        return super().alone(context, budget=self.budget, **more)

    def offers(self, site: Site) -> moefw.Offers:
        """Return the offers: with a budget static rows, and the budget itself if a second run lifts it."""
        if self.rank_capacity is None:
            return super().offers(site)
        lifted = {"budget": (self.rank_capacity,)} if self.on_overflow == "rerun" else {}
        return moefw.offers(
            row_alignment=moefw.ANY, rows=("static",), counts=("device", "host"), row_keys=True, **lifted
        )

    def check(self, site: Site) -> Iterable[moefw.Problem | Iterator[moefw.Problem]]:
        """Return also the problems of a budget without ``on_overflow``, and of the reverse."""
        found = [*super().check(site)]
        if self.rank_capacity is not None and self.on_overflow is None:
            what = "rank_capacity sets a budget, and nothing says what happens to rows beyond it."
            found.append(moefw.Problem(what, "Set on_overflow, for example to rerun.", "rank_capacity"))
        if self.rank_capacity is None and self.on_overflow is not None:
            what = "without rank_capacity there is no budget that could overflow."
            fix = "Set rank_capacity, for example 1.5, or leave on_overflow out."
            found.append(moefw.Problem(what, fix, "on_overflow"))
        return found


def reported(budget: Budget | None, left_out: Tensor | None) -> Mapping[str, Tensor]:
    """Return the statistics of a budget, given how many rows exceeded it; without one, none."""
    return {} if budget is None or left_out is None else {budget.stat: left_out.float()}


def check_tokens(num_tokens: int, max_tokens: int) -> None:
    """Raise ContractError where a rank has more tokens than the option ``max_tokens`` says."""
    if num_tokens > max_tokens:
        what = f"a rank sends {num_tokens} tokens; max_tokens is {max_tokens}."
        raise moefw.ContractError(what, "Set max_tokens to the most tokens of any rank and micro-batch.")
