"""Two-hop dispatch: a token goes to one rank of each node, its gateway, and from there to the ranks of its experts.

The gateway of a token is the rank of the node that has the same place there as the token's own rank. Shapes: legend in
:mod:`moefw.core.stages`; ``P`` ranks of a hop, ``N`` rows that it brings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import moefw
from moefw.core.context import ExpertGroup
from moefw.runtime.communication.exchange import exchange, exchange_now
from moefw.runtime.communication.movement import finish, stay
from moefw_kernels.permute import Arrival, Slots, arrange, distinct, gather, gather_sum, sort_slots

Unit = Callable[[Tensor], Tensor]
"""Returns the position in a hop's group of each rank that holds an expert; below 0 or too large: not there."""


@frozen(kw_only=True, eq=False)
class Hop:
    """One hop over ``group``: which tokens go to which of its ranks, and how many rows come from each."""

    group: ProcessGroup | None
    slots: Slots
    sent: Sequence[int]
    received: Sequence[int]

    def out(self, tensors: Sequence[Tensor], detail: Any = None) -> moefw.Pending[Any]:
        """Start sending the rows of tokens."""
        rows = [gather(tensor, self.slots.rows) for tensor in tensors]
        return exchange(rows, self.sent, self.received, self.group, detail=detail)

    def back(self, sums_ND: Tensor, detail: Any = None) -> moefw.Pending[Any]:
        """Start returning one row for each that came."""
        return exchange([sums_ND], self.received, self.sent, self.group, detail=detail)


@frozen(kw_only=True, eq=False)
class Metadata:
    """The metadata of one movement: its hops, and how the rows of the last one become rows of experts."""

    hops: Sequence[Hop]
    arrival: Arrival


@final
class TwoHopDispatcher(moefw.Dispatcher[Metadata, Metadata]):
    """Sums return the same way: a gateway adds up what its node's ranks return. Keeps nothing between calls.

    A hop that would lead nowhere, in one node or to nodes of one rank, is left out: the first one overlaps.
    """

    def __init__(self, experts: ExpertGroup, *, row_alignment: int) -> None:
        self.experts = experts
        self.row_alignment = row_alignment
        nodes = experts.nodes
        per_node = experts.nodes.count(experts.nodes[0])
        places = [rank // per_node * per_node for rank in range(experts.size)]
        if [nodes[first] for first in places] != [*nodes] or len(set(nodes)) * per_node != experts.size:
            what = f"two_hop wants equally many ranks on every node, one after the other; they lie on {list(nodes)}."
            raise moefw.PlanError(what, "Use an ep x etp that fills whole nodes or divides one.")
        first = places[experts.rank]
        ways: list[tuple[ProcessGroup | None, int, Unit]] = [
            (
                experts.across_nodes(),
                experts.size // per_node,
                lambda ranks: ranks.div(per_node, rounding_mode="floor"),
            ),
            (experts.node_group(), per_node, lambda ranks: ranks - first),
        ]
        self.ways = [way for way in ways if way[0] is not None]

    def plan(
        self, routing: moefw.Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> Metadata:
        """Tell each rank on the way which tokens come, from where, and what they choose. ``counts`` is not used."""
        experts = self.experts
        ids_TK = routing.expert_ids_TK
        capacity = routing.capacity or 0
        notes_NK = torch.cat([torch.full_like(ids_TK[:, :1], experts.rank), ids_TK], 1).int()
        hops: list[Hop] = []
        for group, size, unit in self.ways:
            hop, capacity = _hop(group, size, unit(experts.owners(notes_NK[:, 1:].long())), capacity)
            leaving_NK = notes_NK.index_select(0, hop.slots.rows.token_R)
            notes_NK = exchange_now(leaving_NK, hop.sent, hop.received, group)
            hops.append(hop)
        arrival = arrange(
            notes_NK[:, 1:].long() - experts.first_expert,
            experts.local_experts,
            alignment=self.row_alignment,
            capacity=capacity,
            source_N=notes_NK[:, 0].long(),
        )
        return Metadata(hops=hops, arrival=arrival)

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: Metadata) -> moefw.Pending[Metadata]:
        """Send each token, and all of its weights, on the first hop."""
        sent = [x_TD, weights_TK]
        return plan.hops[0].out(sent, plan) if plan.hops else stay(sent, detail=plan)

    def finish_dispatch(self, pending: moefw.Pending[Metadata]) -> tuple[moefw.ExpertBatch, Metadata]:
        """Pass rows on, and expand those that arrive to one row for each of this rank's experts."""
        metadata = pending.detail
        rows_ND, weights_NK = finish(pending)
        for hop in metadata.hops[1:]:
            rows_ND, weights_NK = finish(hop.out([rows_ND, weights_NK]))
        batch = moefw.ExpertBatch.of(metadata.arrival.expand(rows_ND, weights_NK), metadata.arrival)
        return batch, metadata

    def start_combine(self, rows_RD: Tensor, handle: Metadata) -> moefw.Pending[Metadata]:
        """Add up each row over this rank's experts, then over the ranks that it was passed to."""
        sums_ND = handle.arrival.reduce(rows_RD)
        for hop in reversed(handle.hops[1:]):
            (sums_ND,) = finish(hop.back(sums_ND))
            sums_ND = gather_sum(sums_ND, hop.slots.rows)
        return handle.hops[0].back(sums_ND, handle) if handle.hops else stay([sums_ND], detail=handle)

    def finish_combine(self, pending: moefw.Pending[Metadata]) -> Tensor:
        """Add up each token over the ranks of its first hop."""
        metadata = pending.detail
        (sums_ND,) = finish(pending)
        return gather_sum(sums_ND, metadata.hops[0].slots.rows) if metadata.hops else sums_ND


def _hop(group: ProcessGroup | None, size: int, units_TK: Tensor, capacity: int) -> tuple[Hop, int]:
    """Hop to the given ones of ``size`` ranks, and the sum of their capacities. Exchanges numbers of rows."""
    slots = sort_slots(distinct(units_TK), size)
    ones = [1] * size
    asked_P2 = exchange_now(F.pad(slots.counts.unsqueeze(1), (0, 1), value=capacity), ones, ones, group)
    received, capacities = asked_P2.T.tolist()
    return Hop(group=group, slots=slots, sent=slots.counts.tolist(), received=received), sum(capacities)
