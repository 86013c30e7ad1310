"""Recipes whose GEMMs Transformer Engine computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from moefw.core.contracts import Precision
from moefw.plugins.precision.quantized import MXFP8
from moefw.plugins.precision.quantized.fp8_blockwise import FP8Blockwise
from moefw.plugins.precision.quantized.fp8_tensor import FP8Tensor
from moefw.plugins.precision.quantized.nvfp4 import NVFP4

PLUGINS = {"fp8-blockwise": FP8Blockwise, "mxfp8": MXFP8, "fp8-tensor": FP8Tensor, "nvfp4": NVFP4}
EXACT = {"stochastic_rounding": False, "keep_bf16": ()}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "blockwise": ("fp8-blockwise", {}),
    "blockwise, exact scales": ("fp8-blockwise", {"scales": "fp32"}),
    "mxfp8": ("mxfp8", {}),
    "current": ("fp8-tensor", {}),
    "delayed": ("fp8-tensor", {"scaling": "delayed", "history": 3}),
    "nvfp4": ("nvfp4", EXACT),
    "nvfp4, plain": ("nvfp4", {**EXACT, "hadamard": False, "square_weights": False}),
}
"""Recipes without stochastic rounding, so that everything is deterministic."""


def recipe(name: str, backend: str, **more: Any) -> Precision:
    use, options = RECIPES[name]
    context: Any = SimpleNamespace(device=torch.device("cpu"), site=SimpleNamespace(layer=3))
    return PLUGINS[use](backend=backend, **options, **more).build(context)
