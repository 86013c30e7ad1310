"""Limits of HybridEP, checked before a run starts: those of DeepEP's library, and of nodes.

Pure: needs neither torch nor the library. The library's are from ``is_valid`` and the assertions of
``csrc/hybrid_ep`` (branch hybrid-ep, July 2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import frozen

import moefw

PACKAGE: Final = "hybrid_ep_cpp"
"""The branch's compiled module. Wheels of ``deep_ep`` do not contain it."""
INSTALL: Final = (
    "No wheel carries it. Build the branch: pip install --no-build-isolation "
    "git+https://github.com/deepseek-ai/DeepEP@hybrid-ep (HYBRID_EP_MULTINODE=1 for several nodes), "
    "or use backend: torch."
)
DIM_MULTIPLE: Final = 16
MAX_NODE_RANKS: Final = 72
MAX_LOCAL_EXPERTS: Final = 768
NODE_EXPERTS_MULTIPLE: Final = 4
MAX_TOKENS_BETWEEN_NODES: Final = 21824
CHUNK: Final = 64
"""Tokens of a rank are padded to a multiple of this: the kernel reads whole chunks, and no odd remainder."""


@frozen(kw_only=True)
class Shape:
    """A layer as the library sees it; ``node_ranks`` of its ranks share an NVLink domain (None: not yet known)."""

    model_dim: int
    local_experts: int
    ranks: int
    node_ranks: int | None = None


def limits(shape: Shape, *, max_tokens: int | None = None) -> list[moefw.Problem]:
    """Problem if the library does not support a layer."""
    if shape.ranks == 1:
        return []
    reasons = []
    if shape.model_dim % DIM_MULTIPLE:
        reasons.append(f"model.dim is a multiple of {DIM_MULTIPLE}, not {shape.model_dim}")
    if shape.local_experts > MAX_LOCAL_EXPERTS:
        reasons.append(f"a rank holds at most {MAX_LOCAL_EXPERTS} experts, not {shape.local_experts}")
    if shape.node_ranks is not None:
        reasons += _node_limits(shape, shape.node_ranks, max_tokens)
    if not reasons:
        return []
    return [
        moefw.Problem(
            f"HybridEP cannot carry this layer: {'; '.join(reasons)}.",
            "Use sizes within these limits, or backend: torch.",
            "backend",
        )
    ]


def _node_limits(shape: Shape, node_ranks: int, max_tokens: int | None) -> list[str]:
    """Reasons why the library does not support a layer on NVLink domains of ``node_ranks``."""
    reasons = []
    if node_ranks > MAX_NODE_RANKS:
        reasons.append(f"an NVLink domain has at most {MAX_NODE_RANKS} ranks, not {node_ranks}")
    if shape.ranks % node_ranks:
        reasons.append(f"{shape.ranks} ranks do not divide into NVLink domains of {node_ranks}")
    node_experts = shape.local_experts * node_ranks
    if node_experts % NODE_EXPERTS_MULTIPLE:
        reasons.append(f"the experts of an NVLink domain are a multiple of {NODE_EXPERTS_MULTIPLE}, not {node_experts}")
    if shape.ranks > node_ranks and (max_tokens or 0) > MAX_TOKENS_BETWEEN_NODES:
        reasons.append(f"a rank sends at most {MAX_TOKENS_BETWEEN_NODES} tokens between nodes, not {max_tokens}")
    return reasons


def ranks_per_node(nodes: Sequence[int]) -> int:
    """Number of the group's ranks on each node, given the node of each rank."""
    return nodes.count(nodes[0])


def uneven_nodes(nodes: Sequence[int]) -> moefw.Problem | None:
    """Problem if nodes hold unequal numbers of the group's ranks, or a node's ranks are not consecutive."""
    node_ranks = ranks_per_node(nodes)
    runs = [nodes[first : first + node_ranks] for first in range(0, len(nodes), node_ranks)]
    is_even = all(len(run) == node_ranks and len(set(run)) == 1 for run in runs)
    if is_even and len(set(nodes)) == len(runs):
        return None
    return moefw.Problem(
        "hybridep wants equally many ranks of each expert-parallel group on every node; "
        f"with the layout's ranks_per_node they lie on {list(nodes)}.",
        "Use an ep x etp that fills whole nodes or divides one.",
    )
