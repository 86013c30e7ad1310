"""Which part of a transfer stays in a node of a cluster, whatever its plan took for a node. Imports no torch."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from moefw.compose.assembly import Assembly
from moefw.planner.cluster import Cluster
from moefw.planner.report import Ledger, Transfer

SEND: Final = "send"
ALL_TO_ALL: Final = "all-to-all"
ALL_GATHER: Final = "all-gather"
REDUCE_SCATTER: Final = "reduce-scatter"
ALL_REDUCE: Final = "all-reduce"
IN_STEPS: Final = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
"""Collectives that go through a node's GPUs first, so that each of them sends its part of what leaves the node."""
UNLIMITED: Final = 2**30
"""GPUs that a link connects that connects all of a cluster."""


@frozen
class Route:
    """What a rank sends for one transfer: so many bytes in its ``node``, and over the ``network``.

    They are counted as in a collective over the ``inside`` ranks of the group in a node, and in one over as many ranks
    as the group has ``nodes``.
    """

    node: float
    network: float
    inside: int
    nodes: float


@frozen
class Nodes:
    """GPUs of a node: ``planned``, by which transfers were counted, and ``real``, of the cluster.

    A group lies in as many nodes as its ranks are apart, however few they are: stages and copies are far apart.
    """

    planned: int
    real: int

    @classmethod
    def of(cls, cluster: Cluster, planned: int) -> Nodes:
        """Nodes of a plan on a cluster, which is one node if it has no network.

        Layouts use a power of two of a node's GPUs, or of a plan's nodes in it.
        """
        if cluster.links.node is None:
            return cls(planned, planned)
        gpus = node_gpus(cluster)
        if cluster.links.network is None:
            return cls(planned, gpus)
        return cls(planned, planned * power_of_two(gpus // planned) if gpus >= planned else power_of_two(gpus))

    @classmethod
    def of_plan(cls, cluster: Cluster, plan: Ledger) -> Nodes:
        """Nodes of a plan on a cluster, which took all ranks for one node if it knew of none."""
        return cls.of(cluster, plan.ranks_per_node or plan.world)

    def route(self, transfer: Transfer) -> Route:
        """Route of a transfer."""
        everything = float(transfer.node + transfer.network)
        if transfer.kind == SEND:
            # A step waits for the longest way between two stages, wherever this rank's neighbours are.
            is_inside = transfer.span < self.real
            return Route(everything, 0.0, 2, 1.0) if is_inside else Route(0.0, everything, 1, 2.0)
        inside = _inside(transfer, self.real)
        if transfer.kind in IN_STEPS and everything:
            if self.real == self.planned:  # bytes tell it of any group
                inside = 1 + round((transfer.ranks - 1) * transfer.node / everything)
            return _in_steps(transfer, inside)
        node, network = self._of_peers(transfer, inside)
        return Route(node, network, inside, transfer.ranks / inside)

    def _of_peers(self, transfer: Transfer, inside: int) -> tuple[float, float]:
        """Bytes to peers in the node, and to others. ``inside``: ranks of the group in the node.

        Peers that the plan counted on the other side are sent as much as each of those.
        """
        counted = _inside(transfer, self.planned)
        node, network = float(transfer.node), float(transfer.network)
        moved = 0.0
        if inside > counted:
            moved = network * (inside - counted) / (transfer.ranks - counted)
        elif inside < counted:
            moved = node * (inside - counted) / (counted - 1)
        return node + moved, network - moved


def node_gpus(cluster: Cluster) -> int:
    """GPUs of a node of a cluster; without a link, a GPU is alone."""
    node = cluster.links.node
    if node is None:
        return 1
    return UNLIMITED if node.gpus is None else round(node.gpus.value)


def ranks_of_node(assembly: Assembly, cluster: Cluster, world: int) -> int | None:
    """Ranks that share a node of a cluster, as its launcher of so many would say, a power of two as layouts use.

    None: the spec says how many, or all ranks are in one node.
    """
    gpus = node_gpus(cluster)
    if assembly.site.ranks_per_node is not None or cluster.links.node is None or world <= gpus:
        return None
    return power_of_two(gpus)


def power_of_two(number: int) -> int:
    """Largest power of two that is not more than a number."""
    return 1 << (number.bit_length() - 1)


def _inside(transfer: Transfer, gpus: int) -> int:
    """Ranks of a group, evenly apart, in a node of so many GPUs."""
    if transfer.span < gpus:
        return transfer.ranks
    return max(1, gpus * (transfer.ranks - 1) // transfer.span)


def _in_steps(transfer: Transfer, inside: int) -> Route:
    """Route through the ranks in a node, then to those at the same place in other nodes."""
    nodes = transfer.ranks / inside
    to_each = (transfer.node + transfer.network) / (transfer.ranks - 1)
    if transfer.kind == ALL_REDUCE:  # each rank of a node has the sum of its part
        return Route(to_each * (inside - 1), to_each / inside * (nodes - 1), inside, nodes)
    return Route(to_each * nodes * (inside - 1), to_each * (nodes - 1), inside, nodes)
