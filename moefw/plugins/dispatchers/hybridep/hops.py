"""The two hops of a hierarchical dispatch: to the nodes, and inside a node to the ranks.

Shapes: legend in :mod:`moefw.core.stages`; ``M`` nodes, ``G`` ranks per node, ``N`` rows that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec
from moefw.core.stages import Pending
from moefw.runtime.communication.exchange import Splits, by_rank, exchange, exchange_now
from moefw_kernels.devices import on_host
from moefw_kernels.permute import RowMap, Sorted, count_ids, distinct, gather_sum, sort_choices


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """Rows that one hop sends, in order (destination, token). A token has one row per destination."""

    rows: RowMap
    sent: Splits
    received: Splits

    def send(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        *,
        group: ProcessGroup | None,
        codec: Codec | None,
        detail: object = None,
    ) -> Pending:
        """Start sending the rows, each with the weights of all its choices. Differentiable."""
        tensors = [x_TD, weights_TK.index_select(0, self.rows.token_R)]
        return exchange(tensors, self.sent, self.received, group, codec=codec, rows=self.rows, detail=detail)

    def send_ids(self, ids_NK: Tensor, group: ProcessGroup | None) -> Tensor:
        """Return the expert ids of the rows that arrive."""
        ids = ids_NK.index_select(0, self.rows.token_R).to(torch.int32)
        return exchange_now(ids, self.sent, self.received, group).long()

    def add_up(self, rows_ND: Tensor) -> Tensor:
        """Return the sum of each token's returned rows. Differentiable."""
        return gather_sum(rows_ND, self.rows)


@dataclass(frozen=True, slots=True)
class Told:
    """Values exchanged along both hops: the sum of the ranks' capacities per expert, and their largest token count."""

    capacity: int
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """The hops of one movement: ``sources_N`` is the rank each arriving row comes from, ``counts`` how many rows each
    of this rank's experts gets.
    """

    network: Hop
    node: Hop
    arrived_NK: Tensor
    sources_N: Tensor
    counts: Sequence[int]
    told: Told


def find_way(experts: ExpertGroup, node_size: int, ids_TK: Tensor, own: Told) -> Way:
    """Return the hops of the choices of all ranks, and the ids that arrive. The host waits once. Collective.

    A token for another node arrives there at the rank with the sender's position. The numbers of rows of both hops are
    exchanged first, all on the device. Rows of the second hop are in order (source node, token).
    """
    num_nodes, position = experts.size // node_size, experts.rank % node_size
    first = experts.rank - position
    across, inside = slice(position, None, node_size), slice(first, first + node_size)
    owners = experts.owners(ids_TK)
    found = sort_choices(distinct(owners.div(node_size, rounding_mode="floor")), num_nodes)
    for_ranks_MG = count_ids(distinct(owners), experts.size).view(num_nodes, node_size)
    for_experts = by_rank(count_ids(ids_TK, experts.num_experts), experts).view(num_nodes, -1)
    ahead = torch.cat([found.counts.unsqueeze(1), for_ranks_MG, for_experts], 1)
    ahead = F.pad(F.pad(ahead, (0, 1), value=own.capacity), (0, 1), value=own.longest)
    heard = _exchange(experts, across, ahead)
    from_nodes_GM, for_experts = heard[:, 1 : 1 + node_size].t(), heard[:, 1 + node_size : -2].sum(0)
    passed = torch.stack([heard[:, -2].sum(), heard[:, -1].amax()]).expand(node_size, 2)
    ahead_inside = torch.cat([from_nodes_GM, for_experts.view(node_size, -1), passed], 1)
    heard_inside = _exchange(experts, inside, ahead_inside)
    come_GM, counts_e = heard_inside[:, :num_nodes], heard_inside[:, num_nodes:-2].sum(0)
    told = torch.stack([heard_inside[:, -2].sum(), heard_inside[:, -1].amax()])
    sent, received, passed_on, come, counts, (capacity, longest) = on_host(
        found.counts, heard[:, 0], from_nodes_GM.sum(1), come_GM.sum(1), counts_e, told
    )
    network = _hop(experts, across, found, sent, received)
    landed_NK = network.send_ids(ids_TK, experts.group)
    local = distinct(experts.owners(landed_NK) - first)
    node = _hop(experts, inside, sort_choices(local, node_size), passed_on, come)
    origin_GM = torch.arange(experts.size, device=ids_TK.device).view(num_nodes, node_size).t()
    sources_N = origin_GM.flatten().repeat_interleave(come_GM.flatten(), output_size=sum(come))
    arrived_NK = node.send_ids(landed_NK, experts.group)
    return Way(network, node, arrived_NK, sources_N, counts, Told(capacity, longest))


def _hop(experts: ExpertGroup, peers: slice, found: Sorted, sent: Splits, received: Splits) -> Hop:
    """Return a hop to ``peers``, given the rows to and from each of them."""
    return Hop(found.slots(sum(sent)).rows, *(_spread(experts, peers, rows) for rows in (sent, received)))


def _exchange(experts: ExpertGroup, peers: slice, lines: Tensor) -> Tensor:
    """Exchange a line of numbers with each of ``peers``."""
    along = _spread(experts, peers, [1] * len(lines))
    return exchange_now(lines.contiguous(), along, along, experts.group)


def _spread(experts: ExpertGroup, peers: slice, rows: Splits) -> list[int]:
    """Return the rows to or from each rank of the group, given those of ``peers``."""
    splits = [0] * experts.size
    splits[peers] = rows
    return splits
