"""Our layer with each GEMM of experts that runs here, on the same weights, each held to the same errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_layer import GROUPED, Gemm, Layer, Shape, off
from moefw.core.errors import MoefwError

QUACK = Path(__file__).parent.parent / "examples" / "quack_gemm"
BF16 = {"use": "bf16"}
NAMES = ("grouped", "triton", "quack")


def gemms() -> list[Gemm]:
    """Return the GEMMs of ``NAMES``. That of the example need not be installed, but its library must."""
    plugins: tuple[Any, ...] = ()
    if not entry_points(group="moefw", name="quack"):
        if str(QUACK) not in sys.path:
            sys.path.append(str(QUACK))
        plugins = (importlib.import_module("moefw_quack"),)
    return [GROUPED, Gemm("triton"), Gemm("quack", plugins)]


def layers_of(candidates: list[Gemm], shape: Shape, device: torch.device) -> tuple[dict[str, Layer], dict[str, str]]:
    """Return the layer with each GEMM, all with the weights of the first, and why each other one is left out."""
    found: dict[str, Layer] = {}
    left_out: dict[str, str] = {}
    for gemm in candidates:
        try:
            layer = Layer(BF16, device, shape, gemm=gemm)
        except MoefwError as refusal:
            left_out[gemm.name] = "; ".join(problem.what for problem in refusal.problems)
            continue
        if found:
            layer.take_weights(next(iter(found.values())))
        found[gemm.name] = layer
    return found, left_out


def wrong_ones(layers: Mapping[str, Layer], wanted: Mapping[str, Tensor], allowed: float) -> dict[str, str]:
    """Return by how much each layer is off whose output or a gradient is off by more than ``allowed``."""
    wrong = {}
    for name, layer in layers.items():
        try:
            errors = off(layer.figures(), wanted)
        except Exception as failure:  # one that does not run must not cost the others their numbers
            wrong[name] = f"failed: {type(failure).__name__}: {failure}"[:500]
            continue
        if not all(error <= allowed for error in errors.values()):
            told = ", ".join(f"{figure} off by {error:.2%}" for figure, error in errors.items())
            wrong[name] = f"computes something else: {told}"
    return wrong
