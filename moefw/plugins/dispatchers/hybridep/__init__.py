"""``hybridep``: one row per (token, node) over the slow link, fanned out in the node, summed there on the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

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

    def offers(self, site: Site) -> moefw.Offers:
        """Also that the library keeps the counts of a budget on the device."""
        offers = super().offers(site)
        if self.backend == "library" and self.rank_capacity:
            return {**offers, "counts": ("device",)}
        return offers

    def check(self, site: Site) -> Iterable[moefw.Problem | Iterator[moefw.Problem]]:
        """Also the problem of uneven nodes."""
        return [*super().check(site), *self._uneven(site.layout, site.ranks_per_node)]

    def _uneven(self, layout: LayoutPlan, node_ranks: int | None) -> list[moefw.Problem]:
        """Problem where an expert-parallel group is spread unevenly over nodes of ``node_ranks`` ranks."""
        if node_ranks is None:
            return []
        groups = {layout.group(rank, ("ep", "etp")) for rank in range(layout.world)}
        for group in sorted(groups):
            problem = uneven_nodes([rank // node_ranks for rank in group])
            if problem is not None:
                return [problem]
        return []

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

    def among(self, experts: ExpertGroup, context: moefw.BuildContext) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of this process. Raises PlanError where nodes hold unequal numbers of its ranks."""
        from moefw.plugins.dispatchers.hybridep.torch_backend import TorchHybridEP

        problem = uneven_nodes(experts.nodes)
        if problem:
            raise moefw.PlanError(problem.what, problem.fix)
        if self.backend == "library":
            from moefw.plugins.dispatchers.hybridep.library import build

            return build(experts, context, budget=self.budget, max_tokens=self.max_tokens)
        return TorchHybridEP(experts, budget=self.budget, **self.settled(context))


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [HybridEP]
