"""Counts of the rows and bytes of a hierarchical dispatch, which the library does not report."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moefw.core.context import ExpertGroup
from moefw.plugins.dispatchers.hybridep.nodes import ranks_per_node

INT_BYTES, ID_BYTES, WEIGHT_BYTES = 8, 4, 4
Hop = tuple[Sequence[int], Sequence[int]]
"""Rows sent to, and received from, each rank."""


def both_hops(reached_PTP: Tensor, experts: ExpertGroup) -> list[Hop]:
    """Return this rank's hop to the nodes and its hop inside the node.

    ``reached_PTP[source, token, rank]`` is 1 where a token has an expert on the rank. A token for another node
    arrives there at the rank with the sender's position, which forwards it.
    """
    size, rank, each = experts.size, experts.rank, ranks_per_node(experts.nodes)
    place, first = rank % each, rank // each * each
    to_node = reached_PTP.view(size, reached_PTP.shape[1], -1, each).amax(-1).sum(1).tolist()
    to_rank = reached_PTP.sum(1).tolist()
    network, inside = ([0] * size, [0] * size), ([0] * size, [0] * size)
    for peer in range(place, size, each):
        network[0][peer], network[1][peer] = to_node[rank][peer // each], to_node[peer][rank // each]
    for peer in range(first, first + each):
        inside[0][peer] = sum(to_rank[source][peer] for source in range(place, size, each))
        inside[1][peer] = sum(to_rank[source][rank] for source in range(peer % each, size, each))
    return [network, inside]


def told_beforehand(experts: ExpertGroup, hops: Sequence[Hop], top_k: int) -> list[int]:
    """Return the bytes of counts and expert ids sent to each rank to plan the hops."""
    each, num_nodes = ranks_per_node(experts.nodes), len(set(experts.nodes))
    place, node = experts.rank % each, experts.rank // each
    ids = ID_BYTES * top_k
    counts = [
        INT_BYTES * (3 * (peer % each == place) + (num_nodes + 2) * (peer // each == node))
        for peer in range(experts.size)
    ]
    return [count + ids * sum(sent[peer] for sent, _ in hops) for peer, count in enumerate(counts)]
