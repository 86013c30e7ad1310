"""``hybridep``: one row per (token, node) over the slow link, fanned out in the node, summed there on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import field, frozen
from attrs.validators import gt, optional

import moefw
from moefw.core.contracts import LayoutPlan
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.plugins.dispatchers.hybridep.limits import (
    INSTALL,
    PACKAGE,
    Budget,
    Shape,
    limits,
    ranks_per_node,
    uneven_nodes,
)
from moefw.plugins.dispatchers.library_option import CallsLibrary


@frozen(kw_only=True)
class HybridEP(CallsLibrary):
    """Sends a token once to each node that holds some of its experts. Best with many nodes and slow links.

    ``backend`` torch: the same algorithm over any process group; library: DeepEP's hybrid-ep branch, on GPUs.
    ``rank_capacity``: the static number of rows of a rank, as a multiple of its fair share; null: room for all rows.
    Rows beyond it: ``on_overflow`` rerun runs the step again without the budget, drop drops them.
    ``max_tokens``: the most tokens that a rank ever sends at once. Ranks then need not agree on it: with it and a
    budget the host never waits.
    """

    name: ClassVar[str] = "hybridep"
    package: ClassVar[str] = PACKAGE
    install: ClassVar[str] = INSTALL

    rank_capacity: float | None = field(default=None, validator=optional(gt(0.0)))
    on_overflow: Literal["rerun", "drop"] | None = None

    @property
    def budget(self) -> Budget | None:
        """The row budget of a rank; None: room for all rows."""
        return Budget(self.rank_capacity, self.on_overflow) if self.rank_capacity and self.on_overflow else None

    def offers(self, site: Site) -> moefw.Offers:
        """Return the offers: static rows with a budget, counts on the host except from the library with a budget."""
        reruns = self.budget is not None and self.on_overflow == "rerun"
        budget = {"budget": (self.rank_capacity,)} if reruns else {}
        sync_free = self.backend == "library" and self.rank_capacity
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("static",) if self.rank_capacity else ("ragged", "padded"),
            counts=("device",) if sync_free else ("device", "host"),
            row_keys=True,
            **budget,
        )

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Return also the problems of a budget without ``on_overflow``, of the reverse, and of uneven nodes."""
        found = [*super().check(site)]
        if self.rank_capacity is not None and self.on_overflow is None:
            what = "rank_capacity sets a budget, and nothing says what happens to rows beyond it."
            found.append(moefw.Problem(what, "Use on_overflow: rerun, or on_overflow: drop.", "rank_capacity"))
        if self.rank_capacity is None and self.on_overflow is not None:
            what = "without rank_capacity there is no budget that could overflow."
            fix = "Set rank_capacity, for example 1.5, or leave on_overflow out."
            found.append(moefw.Problem(what, fix, "on_overflow"))
        return found + self._uneven(site.layout, site.ranks_per_node)

    def _uneven(self, layout: LayoutPlan, each: int | None) -> list[moefw.Problem]:
        """Return a problem where an expert-parallel group is spread unevenly over nodes of ``each`` ranks."""
        if each is None:
            return []
        groups = {layout.group(rank, ("ep", "etp")) for rank in range(layout.world)}
        problems = (uneven_nodes([rank // each for rank in group]) for group in sorted(groups))
        return [problem for problem in problems if problem][:1]

    def limits(self, site: Site) -> Sequence[moefw.Problem]:
        """Return the problems of the layer and, if the spec gives it, of its ranks per node. Empty for uneven nodes."""
        if self._uneven(site.layout, site.ranks_per_node):
            return []
        first, each = site.layout.group(0, ("ep", "etp")), site.ranks_per_node
        shape = Shape(
            model_dim=site.dims.model_dim,
            local_experts=site.dims.num_experts // site.layout.sizes["ep"],
            ranks=len(first),
            node_ranks=None if each is None else ranks_per_node([rank // each for rank in first]),
        )
        return limits(shape, max_tokens=self.max_tokens)

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Return the dispatcher of this process. Raises PlanError where nodes hold unequal numbers of its ranks."""
        from moefw.plugins.dispatchers.hybridep.torch_backend import TorchHybridEP

        experts = context.expert_group()
        problem = uneven_nodes(experts.nodes)
        if problem:
            raise moefw.PlanError(problem.what, problem.fix)
        if self.backend == "library":
            from moefw.plugins.dispatchers.hybridep.library import build

            return build(context, budget=self.budget, max_tokens=self.max_tokens)
        return TorchHybridEP(experts, budget=self.budget, **self.settled(context))


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [HybridEP]
