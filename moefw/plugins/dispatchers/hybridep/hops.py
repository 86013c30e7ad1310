"""The two hops of a hierarchical dispatch: to the nodes, and inside a node to the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec
from moefw.core.stages import Pending
from moefw.runtime.communication.exchange import Splits, exchange, exchange_now
from moefw_kernels.permute import RowMap, distinct, gather_sum, sort_slots

Lines = list[list[int]]
"""One line of row counts for each of some ranks."""


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

    def add_up(self, rows_ND: Tensor) -> Tensor:
        """Return the sum of each token's returned rows. Differentiable."""
        return gather_sum(rows_ND, self.rows)


@dataclass(frozen=True, slots=True)
class Told:
    """Values exchanged along both hops: the sum of the ranks' capacities per expert, and their largest token count."""

    capacity: int
    longest: int


def between_nodes(experts: ExpertGroup, node_size: int, ids_TK: Tensor, own: Told) -> tuple[Hop, Told]:
    """Return the hop to the nodes, over ranks of one position (``rank % node_size``), and the values exchanged."""
    owners = experts.owners(ids_TK)
    slots = sort_slots(distinct(owners.div(node_size, rounding_mode="floor")), experts.size // node_size)
    place = slice(experts.rank % node_size, None, node_size)
    rows, told = _exchange_counts(experts, place, slots.counts.unsqueeze(1), own)
    return Hop(slots.rows, *_splits(experts, place, rows)), told


def inside_the_node(
    experts: ExpertGroup, node_size: int, landed_NK: Tensor, landed_from: Sequence[int], heard: Told
) -> tuple[Hop, Tensor, Told]:
    """Return the hop to the ranks of this node, the original rank of each arriving row, and the values exchanged.

    Rows arrived here in order (source node, token), ``landed_from[rank]`` from each rank.
    """
    device, num_nodes = landed_NK.device, experts.size // node_size
    first, place = experts.rank // node_size * node_size, experts.rank % node_size
    slots = sort_slots(distinct(experts.owners(landed_NK.long()) - first), node_size)
    by_node = torch.tensor(landed_from[place::node_size], device=device)
    source_N = torch.arange(num_nodes, device=device).repeat_interleave(by_node)
    towards_R = torch.arange(node_size, device=device).repeat_interleave(slots.counts)
    pairs_R = towards_R * num_nodes + source_N[slots.rows.token_R]
    offered_GM = torch.bincount(pairs_R, minlength=node_size * num_nodes).view(node_size, num_nodes)
    node = slice(first, first + node_size)
    rows, told = _exchange_counts(experts, node, offered_GM, heard)
    places = torch.arange(node_size, device=device).unsqueeze(1)
    origin_GM = torch.arange(num_nodes, device=device) * node_size + places
    asked_GM = torch.tensor(rows[1], device=device)
    sources_N = origin_GM.flatten().repeat_interleave(asked_GM.flatten())
    return Hop(slots.rows, *_splits(experts, node, rows)), sources_N, told


def _exchange_counts(experts: ExpertGroup, peers: slice, counts: Tensor, own: Told) -> tuple[list[Lines], Told]:
    """Exchange a line of counts with each of ``peers``. Return lines sent and received, and the values exchanged."""
    along = [0] * experts.size
    along[peers] = [1] * len(counts)
    offered = torch.cat([counts, counts.new_tensor([[own.capacity, own.longest]]).expand(len(counts), 2)], 1)
    asked = exchange_now(offered, along, along, experts.group)
    both = torch.stack([offered, asked]).tolist()
    told = Told(capacity=sum(line[-2] for line in both[1]), longest=max(line[-1] for line in both[1]))
    return [[line[:-2] for line in lines] for lines in both], told


def _splits(experts: ExpertGroup, peers: slice, both: Sequence[Lines]) -> Lines:
    """Return the rows to and from each rank of the group, given lines for ``peers``."""
    splits = [[0] * experts.size for _ in both]
    for of_ranks, lines in zip(splits, both, strict=True):
        of_ranks[peers] = [sum(line) for line in lines]
    return splits
