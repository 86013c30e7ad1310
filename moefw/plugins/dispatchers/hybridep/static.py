"""Static hops: a rank sends each of its peers equally many rows, whatever the routing. The host reads no count of rows.

Shapes: legend in :mod:`moefw.core.stages`; ``N`` rows that arrive; ``N'`` rows that land here, on their way to the
ranks of this node.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from moefw.core.context import ExpertGroup
from moefw.plugins.dispatchers.budget import Budget
from moefw.plugins.dispatchers.hybridep.hops import Hop, Hops, Place, spread
from moefw.runtime.communication.exchange import by_rank, exchange_now
from moefw_kernels.permute import count_ids, distinct, in_blocks, sort_choices


@frozen
class Rooms:
    """Rows for which the hops have room: ``network`` from a rank to a node, ``node`` from a rank to another one there.

    Under balanced load, rows use ``1 / rank_capacity`` of both, or less where one row serves several experts.
    """

    network: int
    node: int

    @classmethod
    def of(cls, budget: Budget, experts: ExpertGroup, node_size: int, *, max_tokens: int, k: int) -> Rooms:
        """Rooms within a budget, for ``max_tokens`` tokens of a rank with ``k`` choices each."""
        num_nodes = experts.size // node_size
        choices = budget.rows(max_tokens * k, 1)
        # The parts of a split expert may fill several nodes, and a token goes to each of them.
        nodes_of_expert = -(-experts.etp // node_size)
        # A token never needs more than one row for a node, nor a row that landed more than one for a rank.
        network = min(-(-choices * nodes_of_expert // num_nodes), max_tokens)
        node = min(-(-choices * num_nodes // experts.ep), num_nodes * network)
        return cls(network, node)


def static_hops(experts: ExpertGroup, node_size: int, ids_TK: Tensor, rooms: Rooms) -> Hops:
    """Hops of the choices of all ranks, and the ids that arrive: -1 in rows that hold no token. Collective.

    Rows beyond the room of a hop stay where they are.
    """
    place = Place.of(experts, node_size)
    nodes_TK = experts.owners(ids_TK).div(node_size, rounding_mode="floor")
    network = _hop(experts, place.across_nodes, distinct(nodes_TK), rooms.network)
    # (T, K) -> (N', K), in order of nodes
    landed_NK = network.send_ids(ids_TK, experts.metadata_group)
    node = _hop(experts, place.inside_node, distinct(experts.owners(landed_NK) - place.first), rooms.node)
    origin_M = torch.arange(place.num_nodes, device=ids_TK.device) * node_size + place.position
    origin_N = origin_M.repeat_interleave(rooms.network)
    # (N', K + 1) -> (N, K + 1): the last column is the rank that a row comes from
    arrived = node.send_ids(torch.cat([landed_NK, origin_N.unsqueeze(1)], 1), experts.metadata_group)
    return Hops(network, node, arrived_NK=arrived[:, :-1], sources_N=arrived[:, -1])


def _hop(experts: ExpertGroup, peers: slice, peer_TK: Tensor, room: int) -> Hop:
    """Hop with room for so many rows to each of ``peers``, given the ones among them that each token must reach."""
    num_peers = len(range(experts.size)[peers])
    choices = sort_choices(peer_TK, num_peers)
    number_R = torch.arange(room, device=peer_TK.device)
    splits = spread(experts, peers, [room] * num_peers)
    return Hop(
        rows=in_blocks(choices, peer_TK, num_blocks=num_peers, room=room).rows,
        sent=splits,
        received=splits,
        unused_N=(number_R >= choices.counts.unsqueeze(1)).flatten(),
    )


def choices_of_rank(experts: ExpertGroup, ids_TK: Tensor) -> Tensor:
    """Number of choices of this rank's experts by the tokens of all ranks, int64 of shape (). Collective."""
    ones = [1] * experts.size
    choices_P = by_rank(count_ids(ids_TK, experts.num_experts), experts).sum(1)
    return exchange_now(choices_P, ones, ones, experts.metadata_group).sum()
