"""Hierarchical dispatch over a process group: once to each node, there to the ranks that need it; summed in reverse.

A token for another node arrives there at the rank with the sender's position. Shapes: legend in
:mod:`moefw.core.stages`; ``P`` ranks, ``M`` nodes, ``G`` ranks per node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec, Dispatcher
from moefw.core.stages import DispatchHandle, DispatchPlan, ExpertBatch, Pending, Routing
from moefw.plugins.dispatchers.hybridep.hops import Hop, Told, between_nodes, inside_the_node
from moefw.plugins.dispatchers.hybridep.limits import Budget, ranks_per_node
from moefw.runtime.communication.exchange import exchange, exchange_now
from moefw.runtime.communication.movement import finish
from moefw_kernels.permute import Arrival, arrange


@dataclass(slots=True, eq=False)
class _Metadata:
    """The metadata of one movement: two hops, and how rows that arrive are expanded."""

    network: Hop
    node: Hop
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
        """Find the nodes and ranks that each token must reach, hop by hop. ``counts`` is unused."""
        experts, ids_TK, budget = self.experts, routing.expert_ids_TK, None if dropless else self.budget
        own = Told(capacity=routing.capacity or 0, longest=len(ids_TK))
        network, told = between_nodes(experts, self.node_size, ids_TK, own)
        landed_NK = self._forward_ids(ids_TK, network)
        node, sources, told = inside_the_node(experts, self.node_size, landed_NK, network.received, told)
        arrived_NK = self._forward_ids(landed_NK, node).long()
        choices = told.longest * ids_TK.shape[1] * experts.etp
        arrival = arrange(
            arrived_NK - experts.first_expert,
            experts.local_experts,
            alignment=self.row_alignment,
            capacity=told.capacity,
            budget=None if budget is None else budget.rows(choices, self.row_alignment),
            source_N=sources,
        )
        stats = {} if budget is None else {budget.stat: torch.tensor(float(arrival.left_out), device=ids_TK.device)}
        return DispatchPlan(detail=_Metadata(network, node, arrival, stats))

    def _forward_ids(self, ids_NK: Tensor, hop: Hop) -> Tensor:
        ids = ids_NK.index_select(0, hop.rows.token_R).to(torch.int32)
        return exchange_now(ids, hop.sent, hop.received, self.experts.group)

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: DispatchPlan) -> Pending:
        """Send one row per (token, node), and the weights of all its choices."""
        hop: Hop = plan.detail.network
        return hop.send(x_TD, weights_TK, group=self.experts.group, codec=self.codec, detail=plan)

    def start_redispatch(self, x_TD: Tensor, weights_TK: Tensor, handle: DispatchHandle) -> Pending:
        """Send again along the same plan."""
        return self.start_dispatch(x_TD, weights_TK, handle.plan)

    def finish_dispatch(self, pending: Pending) -> tuple[ExpertBatch, DispatchHandle]:
        """Forward the received rows to the ranks of this node, and expand the rows that they forward."""
        plan: DispatchPlan = pending.detail
        metadata: _Metadata = plan.detail
        rows_ND, weights_NK = finish(pending)
        arrived = finish(metadata.node.send(rows_ND, weights_NK, group=self.experts.group, codec=self.codec))
        batch = ExpertBatch.of(metadata.arrival.expand(*arrived), metadata.arrival, metadata.stats)
        return batch, DispatchHandle(plan=plan)

    def start_combine(self, rows_RD: Tensor, handle: DispatchHandle) -> Pending:
        """Add up each row over its local experts and over its node's ranks, and send back one row per (token, node)."""
        metadata: _Metadata = handle.plan.detail
        node, network, group = metadata.node, metadata.network, self.experts.group
        (partial_ND,) = finish(exchange([metadata.arrival.reduce(rows_RD)], node.received, node.sent, group))
        return exchange([node.add_up(partial_ND)], network.received, network.sent, group, detail=metadata)

    def finish_combine(self, pending: Pending) -> Tensor:
        """Add up each token over its nodes."""
        metadata: _Metadata = pending.detail
        (rows_ND,) = finish(pending)
        return metadata.network.add_up(rows_ND)
