"""Layer cases for the DeepEP adapters, and the machine on which a spec with the library is sound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moefw
from moefw.testing.layer_case import LayerCase

BF16 = 4e-2
INTERFACES: dict[str, tuple[int, dict[str, Any]]] = {
    "Buffer": (16, {}),
    "ElasticBuffer": (8192 + 256, {"max_tokens": 16}),
}
"""A model dim that only this interface supports, and its options. V1 takes no rows wider than 8176."""
WORLDS = {
    "two ranks, unequal": ((5, 3), 2, 1),
    "four ranks, one empty": ((4, 0, 7, 2), 4, 1),
    "two groups": ((4, 1, 0, 3), 2, 1),
    "experts in two parts": ((3, 5, 0, 2), 2, 2),
    "experts whole": ((5, 3), 1, 1),
    "one rank": ((7,), 1, 1),
}
"""The tokens of each rank, ep and etp."""
FP8: dict[str, dict[str, Any]] = {
    "fp8-blockwise": {"use": "fp8-blockwise", "backend": "emulate"},
    "mxfp8": {"use": "mxfp8", "backend": "emulate"},
}


def case(world: str, interface: str = "Buffer", **more: Any) -> LayerCase:
    """Return a layer case over the torch backend, whose dispatcher tests replace."""
    tokens, ep, etp = WORLDS[world]
    parts = {
        "dispatch": {"use": "deepep", "backend": "torch"},
        "precision": {"use": "bf16"},
        "gemm": {"use": "loop"},
        "routing": {"use": "topk", "score": "sigmoid"},
        "parallel": {"experts": {"ep": ep, "etp": etp}},
    }
    return LayerCase(**{"tokens": tokens, "dim": INTERFACES[interface][0], "parts": parts, **more})


def with_parts(layer_case: LayerCase, **parts: Any) -> LayerCase:
    """Return the layer case with other parts of its spec."""
    return replace(layer_case, parts={**layer_case.parts, **parts})


def packed(world: str, interface: str, precision: str, **more: Any) -> LayerCase:
    """Return a layer case whose rows travel as the codes and scales of a recipe."""
    layer_case = case(world, interface, num_experts=8, top_k=3, **more)
    wire = {**layer_case.parts["dispatch"], "wire": "fp8"}
    return with_parts(layer_case, dispatch=wire, precision=FP8[precision])


class Cluster(moefw.Machine):
    """A GPU machine with every package."""

    def has_package(self, name: str) -> bool:
        """Return True."""
        return True
