"""``alltoall``: one row per (token, expert), sent directly to the expert's rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import gt, optional

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.plugins.dispatchers.budget_option import SetsBudget

if TYPE_CHECKING:
    from moefw.core.context import ExpertGroup


@frozen(kw_only=True)
class AllToAll(SetsBudget):
    """Sends K*(P-1)/P rows per token over the expert-parallel ranks. Best where K is small compared with P."""

    name: ClassVar[str] = "alltoall"

    on_overflow: Literal["rerun"] | None = None
    """Reaction to rows beyond ``rank_capacity``, of which each sending rank has an equal part.

    ``rerun`` runs the step again without the budget. It is set exactly if ``rank_capacity`` is.
    """
    max_tokens: int | None = field(default=None, validator=optional(gt(0)))
    """Most tokens that a rank ever sends at once; null: ranks agree on it. With it and a budget the host never waits.

    It needs ``rank_capacity``.
    """

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: with ``max_tokens`` also the same rows at every step among ranks that share experts."""
        more = {} if self.max_tokens is None else {"replays": moefw.ANY}
        return {**super().offers(site), **more}

    def check(self, site: Site) -> Iterable[moefw.Problem | Iterator[moefw.Problem]]:
        """Also the problem of ``max_tokens`` without a budget."""
        problems = [*super().check(site)]
        if self.max_tokens is not None and self.rank_capacity is None:
            problems.append(
                moefw.Problem(
                    "max_tokens sizes a budget; without rank_capacity there is none.",
                    "Set rank_capacity, or leave max_tokens out.",
                    "max_tokens",
                )
            )
        return problems

    def alone(self, context: moefw.BuildContext, **more: Any) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of a process that holds all experts, with its budget for ``max_tokens``."""
        return super().alone(context, max_tokens=self.max_tokens, **more)

    def among(self, experts: ExpertGroup, context: moefw.BuildContext) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of this process."""
        from moefw.plugins.dispatchers.alltoall.dispatcher import AllToAllDispatcher
        from moefw.plugins.dispatchers.alltoall.static import Limit

        limit = None if self.budget is None else Limit(self.budget, self.max_tokens)
        counts_on_host = context.facts["counts"] == "host"
        return AllToAllDispatcher(experts, limit=limit, counts_on_host=counts_on_host, **self.settled(context))


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [AllToAll]
