"""Placement of the ranks of an expert-parallel group on nodes."""

from __future__ import annotations

from collections.abc import Sequence

import moefw


def ranks_per_node(nodes: Sequence[int]) -> int:
    """Return the number of the group's ranks on each node, given the node of each rank."""
    return nodes.count(nodes[0])


def uneven_nodes(nodes: Sequence[int]) -> moefw.Problem | None:
    """Return a problem if nodes hold unequal numbers of the group's ranks, or a node's ranks are not consecutive."""
    each = ranks_per_node(nodes)
    even = [nodes[first] for first in range(0, len(nodes), each) for _ in range(each)]
    if list(nodes) == even[: len(nodes)] and len(nodes) % each == 0 and len(set(nodes)) == len(nodes) // each:
        return None
    wants = "hybridep wants equally many ranks of each expert-parallel group on every node"
    what = f"{wants}; with the layout's ranks_per_node they lie on {list(nodes)}."
    return moefw.Problem(what, "Use an ep x etp that fills whole nodes or divides one.")
