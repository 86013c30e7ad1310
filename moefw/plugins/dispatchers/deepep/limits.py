"""Limits of the DeepEP library, checked before a run starts. Pure: needs neither torch nor the library.

Taken from the assertions of DeepEP 2.1 (``csrc/legacy``, ``csrc/elastic`` and the kernels). Device-side assertions end
a run with a trap that names no reason.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

import moefw
from moefw.core.site import Dims

PACKAGE: Final = "deep_ep"
WHEEL_TORCH: Final = "2.13.0"
"""The torch that the wheel of the extra ``deepep`` requires: another makes pip fail."""
INSTALL: Final = (
    "Install it with: pip install 'moefw[deepep]' (the distribution sgl-deep-ep; its wheel needs exactly torch "
    f"{WHEEL_TORCH}: with another, build DeepEP from source), or use backend: torch."
)
BUFFER_RANKS: Final = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
NODE_RANKS: Final = 8
MAX_TOP_K: Final = 32
MAX_NODES_A_TOKEN: Final = 8
BUFFER_MAX_DIM: Final = 8176
BUFFER_MAX_ROW_BYTES: Final = 16376
BUFFER_MAX_LOCAL_EXPERTS: Final = 128
BUFFER_MAX_NODE_EXPERTS: Final = 512
ELASTIC_DIM_MULTIPLE: Final = 256
ELASTIC_MAX_RANKS: Final = 1024
ELASTIC_MAX_EXPERTS: Final = 2048
ELASTIC_MAX_LOCAL_EXPERTS: Final = 256


@frozen(kw_only=True)
class Shape:
    """A layer as the library sees it. Each part of a tensor-parallel expert counts as an expert."""

    model_dim: int
    top_k: int
    num_experts: int
    ranks: int

    @classmethod
    def of(cls, dims: Dims, *, ep: int, etp: int) -> Shape:
        """Shape of a layer whose experts are spread over ep x etp ranks."""
        return cls(model_dim=dims.model_dim, top_k=dims.top_k * etp, num_experts=dims.num_experts * etp, ranks=ep * etp)

    @property
    def local_experts(self) -> int:
        """The number of experts of a rank."""
        return self.num_experts // self.ranks


def buffer_limits(shape: Shape) -> list[str]:
    """Reasons why ``Buffer`` (V1) does not support a layer; empty if it does."""
    reasons = _top_k(shape)
    if shape.ranks not in BUFFER_RANKS:
        reasons.append(f"it runs on {', '.join(map(str, BUFFER_RANKS))} ranks, not {shape.ranks}")
    nodes = -(-shape.ranks // NODE_RANKS)
    if nodes == 1:
        if shape.model_dim % 16:
            reasons.append(f"it moves rows in halves of 16 bytes: model.dim is a multiple of 16, not {shape.model_dim}")
        if shape.model_dim > BUFFER_MAX_DIM:
            reasons.append(f"half a row fits 8192 bytes: model.dim is at most {BUFFER_MAX_DIM}, not {shape.model_dim}")
        if shape.local_experts > BUFFER_MAX_LOCAL_EXPERTS:
            reasons.append(f"a rank holds at most {BUFFER_MAX_LOCAL_EXPERTS} experts, not {shape.local_experts}")
        return reasons
    row_bytes = -(-(2 * shape.model_dim + 8 + 8 * shape.top_k) // 16) * 16
    if shape.model_dim % 256:
        reasons.append(
            f"between nodes it moves 512 bytes a warp: model.dim is a multiple of 256, not {shape.model_dim}"
        )
    if row_bytes > BUFFER_MAX_ROW_BYTES:
        reasons.append(f"a row and its choices are at most {BUFFER_MAX_ROW_BYTES} bytes between nodes, not {row_bytes}")
    if shape.local_experts * NODE_RANKS > BUFFER_MAX_NODE_EXPERTS:
        most = BUFFER_MAX_NODE_EXPERTS // NODE_RANKS
        reasons.append(f"between nodes a rank holds at most {most} experts, not {shape.local_experts}")
    if min(shape.top_k, nodes) > MAX_NODES_A_TOKEN:
        reasons.append(
            f"a token reaches at most {MAX_NODES_A_TOKEN} nodes; top-{shape.top_k} over {nodes} may reach more"
        )
    return reasons


def elastic_limits(shape: Shape, *, max_tokens: int | None) -> list[str]:
    """Reasons why ``ElasticBuffer`` (V2) does not support a layer; empty if it does."""
    reasons = _top_k(shape)
    if shape.model_dim % ELASTIC_DIM_MULTIPLE:
        reasons.append(f"combine wants model.dim to be a multiple of {ELASTIC_DIM_MULTIPLE}, not {shape.model_dim}")
    if shape.ranks > ELASTIC_MAX_RANKS:
        reasons.append(f"it runs on at most {ELASTIC_MAX_RANKS} ranks, not {shape.ranks}")
    if shape.num_experts > ELASTIC_MAX_EXPERTS:
        reasons.append(f"it knows at most {ELASTIC_MAX_EXPERTS} experts, not {shape.num_experts}")
    if shape.local_experts > ELASTIC_MAX_LOCAL_EXPERTS:
        reasons.append(f"a rank holds at most {ELASTIC_MAX_LOCAL_EXPERTS} experts, not {shape.local_experts}")
    if max_tokens is None:
        reasons.append("it is sized by the most tokens that any rank ever sends: set max_tokens")
    return reasons


def limits(shape: Shape, *, max_tokens: int | None = None) -> list[moefw.Problem]:
    """Problem if neither buffer of the library supports a layer."""
    if shape.ranks == 1:
        return []
    buffer = buffer_limits(shape)
    elastic = elastic_limits(shape, max_tokens=max_tokens)
    if not buffer or not elastic:
        return []
    return [
        moefw.Problem(
            f"the DeepEP library cannot carry this layer. Buffer: {'; '.join(buffer)}. "
            f"ElasticBuffer: {'; '.join(elastic)}.",
            "Use sizes within these limits, or backend: torch.",
            "backend",
        )
    ]


def grouped_limits(shape: Shape, *, max_tokens: int | None) -> list[moefw.Problem]:
    """Problem if ``ElasticBuffer``, which alone groups rows by expert, does not support a layer."""
    if shape.ranks == 1:
        return []
    reasons = elastic_limits(shape, max_tokens=max_tokens)
    if not reasons:
        return []
    return [
        moefw.Problem(
            "DeepEP's ElasticBuffer, which alone groups rows by expert, cannot carry this layer: "
            f"{'; '.join(reasons)}.",
            "Use sizes within these limits, or leave grouped out.",
            "grouped",
        )
    ]


def _top_k(shape: Shape) -> list[str]:
    """Reason why neither buffer supports a layer's top-k; empty if both do."""
    if shape.top_k <= MAX_TOP_K:
        return []
    return [f"a warp's lane holds a choice: top-k (times etp) is at most {MAX_TOP_K}, not {shape.top_k}"]
