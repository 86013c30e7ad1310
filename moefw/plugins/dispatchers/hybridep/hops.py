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
    """Rows that one hop sends, in order (destination, token). A token has one row per destination.

    ``unused_N``, bool: the rows that hold no token, where their number is static; None: every row holds one.
    """

    rows: RowMap
    sent: Splits
    received: Splits
    unused_N: Tensor | None = None

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
        tensors = [x_TD, self.rows.gather(weights_TK)]
        return exchange(tensors, self.sent, self.received, group, codec=codec, rows=self.rows, detail=detail)

    def send_ids(self, ids_TK: Tensor, group: ProcessGroup | None) -> Tensor:
        """Ids of the rows that arrive, -1 for those that hold no token."""
        # (T, K) -> (N, K)
        ids_NK = self.rows.gather(ids_TK.to(torch.int32))
        if self.unused_N is not None:
            ids_NK = ids_NK.masked_fill(self.unused_N.unsqueeze(1), -1)
        return exchange_now(ids_NK, self.sent, self.received, group).long()

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
    """

    network: Hop
    node: Hop
    arrived_NK: Tensor
    sources_N: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in its group: the position in its node, the first rank there, and its peers in both hops."""

    num_nodes: int
    position: int
    first: int
    across_nodes: slice
    inside_node: slice

    @classmethod
    def of(cls, experts: ExpertGroup, node_size: int) -> Place:
        """Place of this rank, on nodes of ``node_size`` ranks. Across nodes it meets the ranks with its position."""
        position = experts.rank % node_size
        first = experts.rank - position
        return cls(
            num_nodes=experts.size // node_size,
            position=position,
            first=first,
            across_nodes=slice(position, None, node_size),
            inside_node=slice(first, first + node_size),
        )


def plan_hops(experts: ExpertGroup, node_size: int, ids_TK: Tensor, own: Agreed) -> tuple[Hops, Sequence[int], Agreed]:
    """Hops of the choices of all ranks, how many rows each expert of this rank gets, and on what the ranks agree.

    The host waits once. Collective.

    A token for another node arrives there at the rank with the sender's position. The numbers of rows of both hops are
    exchanged first, all on the device. Rows of the second hop are in order (source node, token).
    """
    place = Place.of(experts, node_size)
    num_nodes = place.num_nodes

    # A line goes to each node, (M, 1 + G + G * e + 2): the rows for the node, the rows for each of its ranks, the
    # choices of each expert of each of its ranks, and this rank's own values.
    owners = experts.owners(ids_TK)
    to_nodes = sort_choices(distinct(owners.div(node_size, rounding_mode="floor")), num_nodes)
    rows_for_MG = count_ids(distinct(owners), experts.size).view(num_nodes, node_size)
    choices_for = by_rank(count_ids(ids_TK, experts.num_experts), experts).view(num_nodes, -1)
    lines = torch.cat([to_nodes.counts.unsqueeze(1), rows_for_MG, choices_for], 1)
    lines = F.pad(F.pad(lines, (0, 1), value=own.capacity), (0, 1), value=own.most_tokens)
    from_nodes = _exchange(experts, place.across_nodes, lines)

    # A line goes on to each rank of this node, (G, M + e + 2): the rows for it from each node, the choices of each of
    # its experts, and the values of all ranks with this position.
    rows_for_GM = from_nodes[:, 1 : 1 + node_size].t()
    choices_for = from_nodes[:, 1 + node_size : -2].sum(0).view(node_size, -1)
    agreed_across = torch.stack([from_nodes[:, -2].sum(), from_nodes[:, -1].amax()])
    lines = torch.cat([rows_for_GM, choices_for, agreed_across.expand(node_size, 2)], 1)
    from_ranks = _exchange(experts, place.inside_node, lines)

    # From each position of this node and each node: the rows that arrive here.
    rows_from_GM = from_ranks[:, :num_nodes]
    counts_e = from_ranks[:, num_nodes:-2].sum(0)
    agreed = torch.stack([from_ranks[:, -2].sum(), from_ranks[:, -1].amax()])
    network_sent, network_received, node_sent, node_received, counts, (capacity, most_tokens) = on_host(
        to_nodes.counts, from_nodes[:, 0], rows_for_GM.sum(1), rows_from_GM.sum(1), counts_e, agreed
    )

    # The ids travel along the hops as rows will: (T, K) -> (N', K) in this node -> (N, K) at this rank.
    network = _hop(experts, place.across_nodes, to_nodes, network_sent, network_received)
    landed_NK = network.send_ids(ids_TK, experts.metadata_group)
    to_ranks = sort_choices(distinct(experts.owners(landed_NK) - place.first), node_size)
    node = _hop(experts, place.inside_node, to_ranks, node_sent, node_received)
    origin_GM = torch.arange(experts.size, device=ids_TK.device).view(num_nodes, node_size).t()
    sources_N = origin_GM.flatten().repeat_interleave(rows_from_GM.flatten(), output_size=sum(node_received))
    arrived_NK = node.send_ids(landed_NK, experts.metadata_group)
    return Hops(network, node, arrived_NK, sources_N), counts, Agreed(capacity, most_tokens)


def _hop(experts: ExpertGroup, peers: slice, destinations: Sorted, sent: Splits, received: Splits) -> Hop:
    """Hop to ``peers``, given each token's destinations, and the rows to and from each of them."""
    return Hop(
        rows=destinations.slots(sum(sent)).rows,
        sent=spread(experts, peers, sent),
        received=spread(experts, peers, received),
    )


def _exchange(experts: ExpertGroup, peers: slice, lines: Tensor) -> Tensor:
    """Send a line of numbers to each of ``peers``, and return the lines that they sent to this rank."""
    splits = spread(experts, peers, [1] * len(lines))
    return exchange_now(lines.contiguous(), splits, splits, experts.metadata_group)


def spread(experts: ExpertGroup, peers: slice, rows: Splits) -> list[int]:
    """Rows to or from each rank of the group, given those of ``peers``."""
    splits = [0] * experts.size
    splits[peers] = rows
    return splits
