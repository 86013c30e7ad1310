"""Hierarchical dispatch over a process group: once to each node, there to the ranks that need it; summed in reverse.

Shapes: legend in :mod:`moefw.core.stages`; ``N`` rows that arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec, Dispatcher
from moefw.core.stages import DispatchHandle, DispatchPlan, ExpertBatch, Pending, Routing
from moefw.plugins.dispatchers.budget import Budget, reported
from moefw.plugins.dispatchers.hybridep.hops import Told, Way, find_way
from moefw.plugins.dispatchers.hybridep.limits import ranks_per_node
from moefw.runtime.communication.exchange import exchange
from moefw.runtime.communication.movement import finish
from moefw_kernels.permute import Arrival, arrange


@dataclass(slots=True, eq=False)
class _Metadata:
    """The metadata of one movement: its hops, and how rows that arrive are expanded."""

    way: Way
    arrival: Arrival
    stats: Mapping[str, Tensor]


@final
class TorchHybridEP(Dispatcher):
    """Two hops each way, with weights in dispatch only; ``plan`` exchanges counts and expert ids along both hops."""

    def __init__(
        self,
        experts: ExpertGroup,
        *,
        row_alignment: int,
        budget: Budget | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.experts, self.row_alignment, self.budget, self.codec = experts, row_alignment, budget, codec
        self.node_size = ranks_per_node(experts.nodes)

    def plan(
        self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> DispatchPlan:
        """Find the nodes and ranks that each token must reach. ``counts`` is unused.

        The host waits once.
        """
        experts, ids_TK, budget = self.experts, routing.expert_ids_TK, None if dropless else self.budget
        way = find_way(experts, self.node_size, ids_TK, Told(capacity=routing.capacity or 0, longest=len(ids_TK)))
        choices = way.told.longest * ids_TK.shape[1] * experts.etp
        arrival = arrange(
            way.arrived_NK - experts.first_expert,
            experts.local_experts,
            alignment=self.row_alignment,
            capacity=way.told.capacity,
            budget=None if budget is None else budget.rows(choices, self.row_alignment),
            source_N=way.sources_N,
            counts=way.counts,
        )
        return DispatchPlan(detail=_Metadata(way, arrival, reported(budget, arrival.left_out)))

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: DispatchPlan) -> Pending:
        """Send one row per (token, node), and the weights of all its choices."""
        way: Way = plan.detail.way
        return way.network.send(x_TD, weights_TK, group=self.experts.group, codec=self.codec, detail=plan)

    def start_redispatch(self, x_TD: Tensor, weights_TK: Tensor, handle: DispatchHandle) -> Pending:
        """Send again along the same plan."""
        return self.start_dispatch(x_TD, weights_TK, handle.plan)

    def finish_dispatch(self, pending: Pending) -> tuple[ExpertBatch, DispatchHandle]:
        """Forward the received rows to the ranks of this node, and expand the rows that they forward."""
        plan: DispatchPlan = pending.detail
        metadata: _Metadata = plan.detail
        arrived = finish(metadata.way.node.send(*finish(pending), group=self.experts.group, codec=self.codec))
        batch = ExpertBatch.of(metadata.arrival.expand(*arrived), metadata.arrival, metadata.stats)
        return batch, DispatchHandle(plan=plan)

    def start_combine(self, rows_RD: Tensor, handle: DispatchHandle) -> Pending:
        """Add up each row over its local experts and over its node's ranks, and send back one row per (token, node)."""
        metadata: _Metadata = handle.plan.detail
        sums_ND, way, group = metadata.arrival.reduce(rows_RD), metadata.way, self.experts.group
        node, network = way.node, way.network
        (partial_ND,) = finish(exchange([sums_ND], node.received, node.sent, group))
        return exchange([node.add_up(partial_ND)], network.received, network.sent, group, detail=metadata)

    def finish_combine(self, pending: Pending) -> Tensor:
        """Add up each token over its nodes."""
        metadata: _Metadata = pending.detail
        (rows_ND,) = finish(pending)
        return metadata.way.network.add_up(rows_ND)
