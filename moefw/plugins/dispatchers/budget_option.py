"""Options of built-in dispatchers that can give a rank a static number of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import gt, optional

import moefw
from moefw.core.site import Site
from moefw.plugins.dispatchers.budget import Budget
from moefw.plugins.dispatchers.wire_option import SendsRows


@frozen(kw_only=True, slots=False)  # with slots it could not be a base beside another class of options
class SetsBudget(SendsRows):
    """Dispatcher that can give each rank a budget, a static number of rows."""

    rank_capacity: float | None = field(default=None, validator=optional(gt(0.0)))
    """Static number of rows of a rank, as a multiple of its fair share; null: room for all rows."""
    on_overflow: Literal["rerun", "drop"] | None = None
    """Reaction to rows beyond ``rank_capacity``. ``rerun`` runs the step again without the budget, ``drop`` drops them.

    It is set exactly if ``rank_capacity`` is.
    """

    @property
    def budget(self) -> Budget | None:
        """The row budget of a rank; None: room for all rows."""
        if self.rank_capacity is None or self.on_overflow is None:
            return None
        return Budget(self.rank_capacity, self.on_overflow)

    def alone(self, context: moefw.BuildContext, **more: Any) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of a process that holds all experts, with its budget."""
        return super().alone(context, budget=self.budget, **more)

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: with a budget static rows, and the budget itself if a second run lifts it."""
        if self.rank_capacity is None:
            return super().offers(site)
        lifted = {"budget": (self.rank_capacity,)} if self.on_overflow == "rerun" else {}
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("static",),
            counts=("device", "host"),
            row_keys=True,
            replays=("alone",),
            **lifted,
        )

    def check(self, site: Site) -> Iterable[moefw.Problem | Iterator[moefw.Problem]]:
        """Also the problems of a budget without ``on_overflow``, and of the reverse."""
        problems = [*super().check(site)]
        if self.rank_capacity is not None and self.on_overflow is None:
            problems.append(
                moefw.Problem(
                    "rank_capacity sets a budget, and nothing says what happens to rows beyond it.",
                    "Set on_overflow, for example to rerun.",
                    "rank_capacity",
                )
            )
        if self.rank_capacity is None and self.on_overflow is not None:
            problems.append(
                moefw.Problem(
                    "without rank_capacity there is no budget that could overflow.",
                    "Set rank_capacity, for example 1.5, or leave on_overflow out.",
                    "on_overflow",
                )
            )
        return problems
