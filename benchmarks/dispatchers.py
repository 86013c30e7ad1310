"""The built-in dispatchers, and assemblies of one alone, for counts of the bytes that it sends. Tests use them, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moefw.compose.assembly import Assembly
from moefw.testing.layer_case import LayerCase

DISPATCHERS: Mapping[str, Mapping[str, Any]] = {
    "allgather": {"use": "allgather"},
    "alltoall": {"use": "alltoall"},
    "deepep": {"use": "deepep", "backend": "torch"},
    "hybridep": {"use": "hybridep", "backend": "torch"},
}
"""The built-in dispatchers, with backends that run on any machine."""


def dispatch_assembly(
    use: str,
    *,
    ep: int,
    etp: int = 1,
    num_experts: int,
    top_k: int,
    dim: int,
    options: Mapping[str, Any] | None = None,
    precision: Mapping[str, Any] | None = None,
) -> Assembly:
    """Assembly of ``ep * etp`` ranks with the registered dispatcher ``use``. Raises the errors of resolve."""
    parts: dict[str, Any] = {
        "dispatch": {"use": use, **(options or {})},
        "parallel": {"experts": {"ep": ep, "etp": etp}},
    }
    parts |= {"precision": dict(precision)} if precision else {}
    return LayerCase(tokens=(1,) * (ep * etp), num_experts=num_experts, top_k=top_k, dim=dim, parts=parts).assemble()
