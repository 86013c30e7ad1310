"""``hybridep``: one row a (token, node) across the slow link, fanned out in the node, summed there for the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import evolve, field, frozen
from attrs.validators import gt, optional

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.core.site import Site
from moefw.ledger.indices import Indices, arrival, distinct_choices
from moefw.ledger.parts import Extent, PartMemory
from moefw.plugins.dispatchers.hybridep.limits import Shape, library_needs, limits
from moefw.plugins.dispatchers.hybridep.nodes import ranks_per_node, uneven_nodes
from moefw.plugins.dispatchers.wire_option import SendsRows


@frozen(kw_only=True)
class HybridEP(SendsRows):
    """Sends a token once to each node that holds some of its experts. Best where nodes are many and links between slow.

    ``backend`` torch: the same algorithm over any process group; library: DeepEP's hybrid-ep branch, on GPUs.
    ``rank_capacity``: each rank has room for so many times its fair share of rows, a static number; null: for all.
    Rows beyond it: ``on_overflow`` rerun runs the step again without the budget, drop leaves them out.
    ``max_tokens``: the most tokens that a rank ever sends at once. The library then asks nobody for it: with it and a
    budget the host waits for nothing.
    """

    name: ClassVar[str] = "hybridep"

    backend: Literal["torch", "library"]
    rank_capacity: float | None = field(default=None, validator=optional(gt(0.0)))
    on_overflow: Literal["rerun", "drop"] | None = None
    max_tokens: int | None = field(default=None, validator=optional(gt(0)))

    def offers(self, site: Site) -> moefw.Offers:
        """Static rows with a budget; the host learns the counts, but not from the library under a budget."""
        reruns = self.rank_capacity and self.on_overflow == "rerun"
        budget = {"budget": (self.rank_capacity,)} if reruns else {}
        sync_free = self.backend == "library" and self.rank_capacity
        return moefw.offers(
            row_alignment=moefw.ANY,
            rows=("static",) if self.rank_capacity else ("ragged", "padded"),
            counts=("device",) if sync_free else ("host", "device"),
            row_keys=True,
            **budget,
        )

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """An expert-parallel axis, and what the library asks for."""
        axis = moefw.need("axis", "ep", reason="tokens travel along the expert-parallel axis")
        return [axis, *self.wire_needs(), *(library_needs() if self.backend == "library" else ())]

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """A budget says what happens beyond it, only a budget can overflow, only the library is sized beforehand.

        And only bf16 goes through it.
        """
        if self.backend == "library" and self.wire != "high":
            what = "rows go through the library in bf16."
            return [moefw.Problem(what, "Use wire: high, or backend: torch.", "wire")]
        if self.max_tokens is not None and self.backend != "library":
            what = "max_tokens sizes the library's buffer; backend: torch has none."
            return [moefw.Problem(what, "Leave max_tokens out, or use backend: library.", "max_tokens")]
        if (self.rank_capacity is None) == (self.on_overflow is None):
            return []
        if self.on_overflow is None:
            what = "rank_capacity sets a budget, and nothing says what happens to rows beyond it."
            return [moefw.Problem(what, "Use on_overflow: rerun, or on_overflow: drop.", "rank_capacity")]
        what = "without rank_capacity there is no budget that could overflow."
        return [moefw.Problem(what, "Set rank_capacity, for example 1.5, or leave on_overflow out.", "on_overflow")]

    def memory(self, extent: Extent) -> PartMemory | None:
        """Indices of a row for each (token, node) and (token, rank). Nothing is known of the library."""
        if self.backend != "torch":
            return None
        top_k, choices = extent.dims.top_k, extent.dims.top_k * extent.etp
        inside = min(extent.ranks_per_node, extent.ranks)
        nodes = min(top_k, extent.ranks // inside)
        landed, ranks = extent.tokens * nodes, min(max(1, choices // nodes), inside)
        rows = extent.rows
        if self.rank_capacity is not None:
            rows = extent.aligned(math.ceil(self.rank_capacity * extent.choices * extent.etp))
        hops = distinct_choices(extent.tokens, choices, nodes), distinct_choices(landed, choices, ranks)
        indices = (*hops, arrival(landed * ranks, top_k, extent.valid_rows, extent.rows))
        total = Indices(saved=sum(one.saved for one in indices), held=sum(one.held for one in indices))
        known = evolve(extent, budget=rows)
        return evolve(self.movement(known, total, arriving=landed * ranks, returning=landed * ranks), rows=rows)

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Return the dispatcher of this process. Raises PlanError where nodes hold unequal numbers of its ranks."""
        from moefw.plugins.dispatchers.hybridep.torch_backend import TorchHybridEP

        experts = context.expert_group()
        problem = uneven_nodes(experts.nodes)
        if problem:
            raise moefw.PlanError(problem.what, problem.fix)
        if self.backend == "library":
            from moefw.plugins.dispatchers.hybridep.library import build

            drops = self.on_overflow == "drop"
            return build(context, rank_capacity=self.rank_capacity, drops=drops, max_tokens=self.max_tokens)
        return TorchHybridEP(
            experts,
            row_alignment=context.facts["row_alignment"],
            rank_capacity=self.rank_capacity,
            drops=self.on_overflow == "drop",
            codec=self.codec(context),
        )


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [HybridEP]


@moefw.hookimpl
def moefw_check(assembly: moefw.Assembly) -> list[moefw.Problem]:
    """Hold every expert-parallel group against the nodes, where the spec says how large they are, and the library."""
    dispatch, layout = assembly.parts.dispatch, assembly.layout
    if not isinstance(dispatch, HybridEP):
        return []
    each = assembly.parts.parallel.ranks_per_node
    problems: list[moefw.Problem | None] = []
    if each is not None:
        groups = {layout.group(rank, ("ep", "etp")) for rank in range(layout.world)}
        problems = [uneven_nodes([rank // each for rank in group]) for group in sorted(groups)]
    found = [problem for problem in problems if problem][:1]
    if dispatch.backend != "library" or found:
        return found
    first = layout.group(0, ("ep", "etp"))
    shape = Shape(
        model_dim=assembly.site.dims.model_dim,
        local_experts=assembly.site.dims.num_experts // layout.sizes["ep"],
        ranks=len(first),
        node_ranks=None if each is None else ranks_per_node([rank // each for rank in first]),
    )
    return [evolve(problem, where="dispatch.backend") for problem in limits(shape, max_tokens=dispatch.max_tokens)]
