"""Hierarchical dispatch over a process group: once to each node, there to the ranks that need it; summed in reverse.

Shapes: legend in :mod:`moefw.core.stages`; ``N`` rows that arrive; ``N'`` rows that land here, on their way to the
ranks of this node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec, Dispatcher
from moefw.core.stages import ExpertBatch, Pending, Routing
from moefw.plugins.dispatchers.budget import Budget, check_tokens, reported
from moefw.plugins.dispatchers.hybridep.hops import Agreed, Hops, plan_hops
from moefw.plugins.dispatchers.hybridep.limits import ranks_per_node
from moefw.plugins.dispatchers.hybridep.static import Rooms, choices_of_rank, static_hops
from moefw.runtime.communication.exchange import exchange
from moefw.runtime.communication.movement import finish
from moefw_kernels.permute import Arrival, arrange


@dataclass(slots=True, eq=False)
class _Metadata:
    """The metadata of one movement: its hops, and how rows that arrive are expanded."""

    hops: Hops
    arrival: Arrival
    stats: Mapping[str, Tensor]


@final
class TorchHybridEP(Dispatcher[_Metadata, _Metadata]):
    """Two hops each way, with weights in dispatch only; ``plan`` exchanges counts and expert ids along both hops."""

    def __init__(
        self,
        experts: ExpertGroup,
        *,
        row_alignment: int,
        counts_on_host: bool = True,
        budget: Budget | None = None,
        max_tokens: int | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.experts = experts
        self.row_alignment = row_alignment
        self.counts_on_host = counts_on_host
        self.budget = budget
        self.max_tokens = max_tokens
        self.codec = codec
        self.node_size = ranks_per_node(experts.nodes)

    def plan(
        self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> _Metadata:
        """Find the nodes and ranks that each token must reach. ``counts`` is unused.

        The host waits once; of static sizes, only for counts that a part needs.
        """
        experts = self.experts
        ids_TK = routing.expert_ids_TK
        budget = None if dropless else self.budget
        if budget is not None and self.max_tokens is not None:
            return self._static(budget, self.max_tokens, ids_TK)
        own = Agreed(capacity=routing.capacity or 0, most_tokens=len(ids_TK))
        # (T, K) -> the ids of the rows that arrive (N, K)
        hops, expected, agreed = plan_hops(experts, self.node_size, ids_TK, own)
        most_choices = agreed.most_tokens * ids_TK.shape[1] * experts.etp
        arrival = arrange(
            hops.arrived_NK - experts.first_expert,
            experts.local_experts,
            alignment=self.row_alignment,
            capacity=agreed.capacity,
            budget=None if budget is None else budget.rows(most_choices, self.row_alignment),
            source_N=hops.sources_N,
            counts=expected,
        )
        return _Metadata(hops, arrival, reported(budget, arrival.left_out))

    def _static(self, budget: Budget, max_tokens: int, ids_TK: Tensor) -> _Metadata:
        """Metadata whose sizes follow from ``max_tokens``, and from no value."""
        experts = self.experts
        num_tokens, k = ids_TK.shape
        check_tokens(num_tokens, max_tokens)
        rooms = Rooms.of(budget, experts, self.node_size, max_tokens=max_tokens, k=k)
        hops = static_hops(experts, self.node_size, ids_TK, rooms)
        arrival = arrange(
            hops.arrived_NK - experts.first_expert,
            experts.local_experts,
            alignment=self.row_alignment,
            budget=budget.rows(max_tokens * k * experts.etp, self.row_alignment),
            source_N=hops.sources_N,
            counts_on_host=self.counts_on_host,
        )
        # Rows that found no room in a hop did not arrive.
        left_out = choices_of_rank(experts, ids_TK) - arrival.counts_e.sum()
        return _Metadata(hops, arrival, reported(budget, left_out))

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: _Metadata) -> Pending[_Metadata]:
        """Send one row per (token, node), and the weights of all its choices."""
        # (T, D) and (T, K) -> rows that land in this node, (N', D) and (N', K)
        return plan.hops.network.send(x_TD, weights_TK, group=self.experts.group, codec=self.codec, detail=plan)

    def finish_dispatch(self, pending: Pending[_Metadata]) -> tuple[ExpertBatch, _Metadata]:
        """Forward the received rows to the ranks of this node, and expand the rows that they forward."""
        metadata = pending.detail
        landed_ND, landed_NK = finish(pending)
        # (N', D) and (N', K), which landed in this node -> (N, D) and (N, K), which are for this rank
        inside: Pending[None] = metadata.hops.node.send(
            landed_ND, landed_NK, group=self.experts.group, codec=self.codec
        )
        rows_ND, weights_NK = finish(inside)
        # -> (R, D) and (R), grouped by expert
        batch = ExpertBatch.of(metadata.arrival.expand(rows_ND, weights_NK), metadata.arrival, metadata.stats)
        return batch, metadata

    def start_combine(self, rows_RD: Tensor, handle: _Metadata) -> Pending[_Metadata]:
        """Add up each row over its local experts and over its node's ranks, and send back one row per (token, node)."""
        node = handle.hops.node
        network = handle.hops.network
        group = self.experts.group
        # (R, D) -> (N, D), sums over this rank's experts
        sums_ND = handle.arrival.reduce(rows_RD)
        # -> (N', D), sums over the ranks of the node, at the rank where the row landed
        (partial_ND,) = finish(exchange([sums_ND], node.received, node.sent, group))
        landed_ND = node.add_up(partial_ND)
        return exchange([landed_ND], network.received, network.sent, group, detail=handle)

    def finish_combine(self, pending: Pending[_Metadata]) -> Tensor:
        """Add up each token over its nodes."""
        (rows_ND,) = finish(pending)
        # -> (T, D)
        return pending.detail.hops.network.add_up(rows_ND)
