"""``hybridep``: one row per (token, node) over the slow link, fanned out in the node, summed there on the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import field, frozen
from attrs.validators import gt, optional

import moefw
from moefw.core.contracts import LayoutPlan
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.plugins.dispatchers.budget_option import SetsBudget
from moefw.plugins.dispatchers.hybridep.limits import INSTALL, PACKAGE, Shape, limits, ranks_per_node, uneven_nodes
from moefw.plugins.dispatchers.library_option import CallsLibrary

if TYPE_CHECKING:
    from moefw.core.context import ExpertGroup


@frozen(kw_only=True)
class HybridEP(CallsLibrary, SetsBudget):
    """Sends a token once to each node that holds some of its experts. Best with many nodes and slow links.

    Its library is DeepEP's hybrid-ep branch. Ranks need not agree on the most tokens where ``max_tokens`` gives it:
    with it and a budget the host never waits.
    """

    name: ClassVar[str] = "hybridep"
    package: ClassVar[str] = PACKAGE
    install: ClassVar[str] = INSTALL

    max_tokens: int | None = field(default=None, validator=optional(gt(0)))
    """Most tokens that a rank ever sends at once, which size the library's buffer; null: ranks agree on it.

    With ``backend: torch`` it needs ``rank_capacity`` and ``on_overflow: rerun``.
    """

    def offers(self, site: Site) -> moefw.Offers:
        """Also that the library keeps the counts of a budget on the device.

        With ``max_tokens``, ``backend: torch`` has the same rows at every step among ranks that share experts.
        """
        offers = super().offers(site)
        if self.backend == "library":
            return {**offers, "counts": ("device",)} if self.rank_capacity else offers
        return offers if self.max_tokens is None else {**offers, "replays": moefw.ANY}

    def check(self, site: Site) -> Iterable[moefw.Problem | Iterator[moefw.Problem]]:
        """Also the problem of uneven nodes."""
        return [*super().check(site), *self._uneven(site.layout, site.ranks_per_node)]

    def _uneven(self, layout: LayoutPlan, node_ranks: int | None) -> list[moefw.Problem]:
        """Problem where an expert-parallel group is spread unevenly over nodes of ``node_ranks`` ranks."""
        if node_ranks is None:
            return []
        seen: set[int] = set()
        for first in range(layout.world):
            if first in seen:
                continue
            group = layout.group(first, ("ep", "etp"))
            seen.update(group)
            problem = uneven_nodes([rank // node_ranks for rank in group])
            if problem is not None:
                return [problem]
        return []

    def _max_tokens_of_torch(self) -> Sequence[moefw.Problem]:
        """Problem of ``max_tokens`` without a budget that a second run lifts."""
        if self.on_overflow == "rerun":
            return []
        return [
            moefw.Problem(
                "with backend: torch, max_tokens sizes each hop for a budget. Rows beyond a hop are others than those "
                "beyond the budget of a rank, so only a second run without it is right.",
                "Set rank_capacity and on_overflow: rerun, or leave max_tokens out.",
                "max_tokens",
            )
        ]

    def limits(self, site: Site) -> Sequence[moefw.Problem]:
        """Problems of the layer and, if the spec gives it, of its ranks per node. Empty for uneven nodes."""
        if self._uneven(site.layout, site.ranks_per_node):
            return []
        group = site.layout.group(0, ("ep", "etp"))
        node_ranks = None
        if site.ranks_per_node is not None:
            node_ranks = ranks_per_node([rank // site.ranks_per_node for rank in group])
        shape = Shape(
            model_dim=site.dims.model_dim,
            local_experts=site.dims.num_experts // site.layout.sizes["ep"],
            ranks=len(group),
            node_ranks=node_ranks,
        )
        return limits(shape, max_tokens=self.max_tokens)

    def alone(self, context: moefw.BuildContext, **more: Any) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of a process that holds all experts, with its budget for ``max_tokens``."""
        return super().alone(context, max_tokens=self.max_tokens, **more)

    def among(self, experts: ExpertGroup, context: moefw.BuildContext) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of this process. Raises PlanError where nodes hold unequal numbers of its ranks."""
        from moefw.plugins.dispatchers.hybridep.torch_backend import TorchHybridEP

        problem = uneven_nodes(experts.nodes)
        if problem:
            raise moefw.PlanError(problem.what, problem.fix)
        if self.backend == "library":
            from moefw.plugins.dispatchers.hybridep.library import build

            return build(experts, context, budget=self.budget, max_tokens=self.max_tokens)
        return TorchHybridEP(
            experts,
            counts_on_host=context.facts["counts"] == "host",
            budget=self.budget,
            max_tokens=self.max_tokens,
            **self.settled(context),
        )


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [HybridEP]
