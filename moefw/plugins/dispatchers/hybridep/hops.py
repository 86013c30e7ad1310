"""The two hops of a hierarchical dispatch: to the nodes, and inside a node to the ranks.

Shapes: legend in :mod:`moefw.core.stages`; ``M`` nodes, ``G`` ranks per node, ``N`` rows that arrive; ``N'`` rows that
land here, on their way to the ranks of this node.
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
from moefw.runtime.communication.movement import D
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
        detail: D = None,  # type: ignore[assignment]
    ) -> Pending[D]:
        """Start sending the rows, each with the weights of all its choices. Differentiable."""
        # Tokens (T, D) -> rows (N, D), by ``rows``; weights (T, K) -> (N, K)
        tensors = [x_TD, weights_TK.index_select(0, self.rows.token_R)]
        return exchange(tensors, self.sent, self.received, group, codec=codec, rows=self.rows, detail=detail)

    def send_ids(self, ids_NK: Tensor, group: ProcessGroup | None) -> Tensor:
        """Expert ids of the rows that arrive."""
        ids = ids_NK.index_select(0, self.rows.token_R).to(torch.int32)
        return exchange_now(ids, self.sent, self.received, group).long()

    def add_up(self, rows_ND: Tensor) -> Tensor:
        """Sum of each token's returned rows. Differentiable."""
        return gather_sum(rows_ND, self.rows)


@dataclass(frozen=True, slots=True)
class Agreed:
    """Values on which the ranks agree: the sum of their capacities per expert, and the most tokens that one has.

    Of one rank alone: its own capacity and number of tokens.
    """

    capacity: int
    most_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Hops:
    """The hops of one movement: over the network to each node, then in the node to each rank.

    ``arrived_NK``: the expert ids of the rows that arrive here, ``sources_N`` the rank that each of them comes from.
    ``counts``: how many rows each of this rank's experts gets.
    """

    network: Hop
    node: Hop
    arrived_NK: Tensor
    sources_N: Tensor
    counts: Sequence[int]
    agreed: Agreed


def plan_hops(experts: ExpertGroup, node_size: int, ids_TK: Tensor, own: Agreed) -> Hops:
    """Hops of the choices of all ranks, and the ids that arrive. The host waits once. Collective.

    A token for another node arrives there at the rank with the sender's position. The numbers of rows of both hops are
    exchanged first, all on the device. Rows of the second hop are in order (source node, token).
    """
    num_nodes = experts.size // node_size
    position = experts.rank % node_size
    first = experts.rank - position
    across_nodes = slice(position, None, node_size)  # the ranks with this rank's position
    inside_node = slice(first, first + node_size)

    # A line goes to each node, (M, 1 + G + G * e + 2): the rows for the node, the rows for each of its ranks, the
    # choices of each expert of each of its ranks, and this rank's own values.
    owners = experts.owners(ids_TK)
    to_nodes = sort_choices(distinct(owners.div(node_size, rounding_mode="floor")), num_nodes)
    rows_for_MG = count_ids(distinct(owners), experts.size).view(num_nodes, node_size)
    choices_for = by_rank(count_ids(ids_TK, experts.num_experts), experts).view(num_nodes, -1)
    lines = torch.cat([to_nodes.counts.unsqueeze(1), rows_for_MG, choices_for], 1)
    lines = F.pad(F.pad(lines, (0, 1), value=own.capacity), (0, 1), value=own.most_tokens)
    from_nodes = _exchange(experts, across_nodes, lines)

    # A line goes on to each rank of this node, (G, M + e + 2): the rows for it from each node, the choices of each of
    # its experts, and the values of all ranks with this position.
    rows_for_GM = from_nodes[:, 1 : 1 + node_size].t()
    choices_for = from_nodes[:, 1 + node_size : -2].sum(0).view(node_size, -1)
    agreed_across = torch.stack([from_nodes[:, -2].sum(), from_nodes[:, -1].amax()])
    lines = torch.cat([rows_for_GM, choices_for, agreed_across.expand(node_size, 2)], 1)
    from_ranks = _exchange(experts, inside_node, lines)

    # From each position of this node and each node: the rows that arrive here.
    rows_from_GM = from_ranks[:, :num_nodes]
    counts_e = from_ranks[:, num_nodes:-2].sum(0)
    agreed = torch.stack([from_ranks[:, -2].sum(), from_ranks[:, -1].amax()])
    network_sent, network_received, node_sent, node_received, counts, (capacity, most_tokens) = on_host(
        to_nodes.counts, from_nodes[:, 0], rows_for_GM.sum(1), rows_from_GM.sum(1), counts_e, agreed
    )

    # The ids travel along the hops as rows will: (T, K) -> (N', K) in this node -> (N, K) at this rank.
    network = _hop(experts, across_nodes, to_nodes, network_sent, network_received)
    landed_NK = network.send_ids(ids_TK, experts.metadata_group)
    to_ranks = sort_choices(distinct(experts.owners(landed_NK) - first), node_size)
    node = _hop(experts, inside_node, to_ranks, node_sent, node_received)
    origin_GM = torch.arange(experts.size, device=ids_TK.device).view(num_nodes, node_size).t()
    sources_N = origin_GM.flatten().repeat_interleave(rows_from_GM.flatten(), output_size=sum(node_received))
    return Hops(
        network=network,
        node=node,
        arrived_NK=node.send_ids(landed_NK, experts.metadata_group),
        sources_N=sources_N,
        counts=counts,
        agreed=Agreed(capacity, most_tokens),
    )


def _hop(experts: ExpertGroup, peers: slice, destinations: Sorted, sent: Splits, received: Splits) -> Hop:
    """Hop to ``peers``, given each token's destinations, and the rows to and from each of them."""
    return Hop(
        rows=destinations.slots(sum(sent)).rows,
        sent=_spread(experts, peers, sent),
        received=_spread(experts, peers, received),
    )


def _exchange(experts: ExpertGroup, peers: slice, lines: Tensor) -> Tensor:
    """Send a line of numbers to each of ``peers``, and return the lines that they sent to this rank."""
    splits = _spread(experts, peers, [1] * len(lines))
    return exchange_now(lines.contiguous(), splits, splits, experts.metadata_group)


def _spread(experts: ExpertGroup, peers: slice, rows: Splits) -> list[int]:
    """Rows to or from each rank of the group, given those of ``peers``."""
    splits = [0] * experts.size
    splits[peers] = rows
    return splits
