"""The two hops of a hierarchical dispatch: to the nodes, and inside a node to the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.exchange import Splits, exchange, exchange_now
from moefw.core.expert_group import ExpertGroup
from moefw.core.movement import Codec, Pending
from moefw_kernels.permute import RowMap, distinct, gather_sum, sort_slots


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """Rows that one hop sends, in order (destination, token), each destination of a token once."""

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
        """Start sending the rows, and the weights of all choices of each. Differentiable."""
        tensors = [x_TD, weights_TK.index_select(0, self.rows.token_R)]
        return exchange(tensors, self.sent, self.received, group, codec=codec, rows=self.rows, detail=detail)

    def add_up(self, rows_ND: Tensor) -> Tensor:
        """Return the sum of each token's rows that came back. Differentiable."""
        return gather_sum(rows_ND, self.rows)


def between_nodes(
    experts: ExpertGroup, node_size: int, ids_TK: Tensor, facts: tuple[int, int]
) -> tuple[Hop, list[tuple[int, int]]]:
    """Return the hop to the nodes, over ranks of one place (``rank % node_size``), and the ``facts`` of every rank."""
    owners = experts.owners(ids_TK)
    slots = sort_slots(distinct(owners.div(node_size, rounding_mode="floor")), experts.size // node_size)
    ones, place = [1] * experts.size, experts.rank % node_size
    offered_P3 = torch.tensor(facts, device=ids_TK.device).expand(experts.size, 2)
    rows_P = torch.zeros(experts.size, dtype=torch.int64, device=ids_TK.device)
    rows_P[place::node_size] = slots.counts
    offered_P3 = torch.cat([rows_P.unsqueeze(1), offered_P3], 1)
    asked_P3 = exchange_now(offered_P3, ones, ones, experts.group)
    sent, received = torch.stack([rows_P, asked_P3[:, 0]]).tolist()
    return Hop(slots.rows, sent, received), [(capacity, length) for _, capacity, length in asked_P3.tolist()]


def inside_the_node(
    experts: ExpertGroup, node_size: int, landed_NK: Tensor, landed_from: Sequence[int]
) -> tuple[Hop, Tensor]:
    """Return the hop to the ranks of this node, and the rank that each row which arrives came from at first.

    Rows landed in order (source node, token), ``landed_from[rank]`` from each rank.
    """
    device, num_nodes = landed_NK.device, experts.size // node_size
    first, place = experts.rank // node_size * node_size, experts.rank % node_size
    slots = sort_slots(distinct(experts.owners(landed_NK.long()) - first), node_size)
    by_node = torch.tensor(landed_from[place::node_size], device=device)
    source_N = torch.arange(num_nodes, device=device).repeat_interleave(by_node)
    towards_R = torch.arange(node_size, device=device).repeat_interleave(slots.counts)
    pairs_R = towards_R * num_nodes + source_N[slots.rows.token_R]
    offered_GM = torch.bincount(pairs_R, minlength=node_size * num_nodes).view(node_size, num_nodes)
    near = [int(first <= rank < first + node_size) for rank in range(experts.size)]
    asked_GM = exchange_now(offered_GM, near, near, experts.group)
    sent, received = [0] * experts.size, [0] * experts.size
    node = slice(first, first + node_size)
    sent[node], received[node] = torch.stack([offered_GM.sum(1), asked_GM.sum(1)]).tolist()
    places = torch.arange(node_size, device=device).unsqueeze(1)
    origin_GM = torch.arange(num_nodes, device=device) * node_size + places
    return Hop(slots.rows, sent, received), origin_GM.flatten().repeat_interleave(asked_GM.flatten())
