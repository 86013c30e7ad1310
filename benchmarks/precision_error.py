"""Rounding errors of one MoE layer: of its output and of every gradient against fp32, by precision recipe.

Each recipe runs the layer's own code on one rank, on the same tokens and weights, which are exact in bf16. An error is
the norm of the difference over the norm of the fp32 result (Frobenius), with the gradients of all experts taken
together. Tokens are normally distributed; with "outliers", one of 100 channels is 64 times as large. Errors are the
root mean square over ``--seeds`` draws. E4M3 rounds a number in the same way under every power of two, so mxfp8 and
fp8-blockwise differ only where a block spans more than 15 binades. To add a recipe, put it with its options into
``RECIPES``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table
from torch import Tensor

import record
from moefw.core.stages import Batch
from moefw.runtime.compute.row_keys import keyed
from moefw.runtime.naming import canonical_parameters, initialise
from moefw.testing.layer_case import LayerCase, build_layer

RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"use": "bf16"},
    "fp8-blockwise": {"use": "fp8-blockwise", "backend": "emulate"},
    "fp8-blockwise, fp32 scales": {"use": "fp8-blockwise", "backend": "emulate", "scales": "fp32"},
    "fp8-blockwise, saved fp8": {"use": "fp8-blockwise", "backend": "emulate", "saved_activations": "fp8"},
    "mxfp8": {"use": "mxfp8", "backend": "emulate"},
    "mxfp8, saved fp8": {"use": "mxfp8", "backend": "emulate", "saved_activations": "fp8"},
    "fp8-tensor": {"use": "fp8-tensor", "backend": "emulate"},
    "nvfp4": {"use": "nvfp4", "backend": "emulate", "keep_bf16": []},
    "nvfp4, to nearest": {"use": "nvfp4", "backend": "emulate", "keep_bf16": [], "stochastic_rounding": False},
    "nvfp4, no transform": {"use": "nvfp4", "backend": "emulate", "keep_bf16": [], "hadamard": False},
}
ROW_ALIGNMENT = 128
FIGURES = ("out", "x", "router", "gate", "up", "down")


@frozen(kw_only=True)
class Shape:
    """A layer and its tokens."""

    name: str
    tokens: int = 256
    dim: int
    expert_dim: int
    num_experts: int = 8
    top_k: int = 2
    outliers: bool = False


SHAPES = (
    Shape(name="256 wide", dim=256, expert_dim=128),
    Shape(name="512 wide", dim=512, expert_dim=256),
    Shape(name="512 wide, outliers", dim=512, expert_dim=256, outliers=True),
)


def main() -> None:
    """Measure, print and write ``results/precision_error.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="draws of tokens and weights")
    arguments = parser.parse_args()
    results = []
    for shape in SHAPES:
        found = {name: errors(shape, recipe, arguments.seeds) for name, recipe in RECIPES.items()}
        results.append({"shape": asdict(shape), "errors": found})
    show(results)
    measured = {
        "unit": "norm of the difference to fp32 / norm of the fp32 result",
        "seeds": arguments.seeds,
        "recipes": RECIPES,
        "cases": results,
    }
    print(record.write("precision_error", measured))


def errors(shape: Shape, recipe: Mapping[str, Any], seeds: int) -> dict[str, float]:
    """Return the error of each figure as the root mean square over draws."""
    squares = dict.fromkeys(FIGURES, 0.0)
    for seed in range(seeds):
        got, wanted = (solved(shape, choice, seed) for choice in (recipe, {"use": "fp32"}))
        for figure in FIGURES:
            squares[figure] += relative(got[figure], wanted[figure]) ** 2 / seeds
    return {figure: round(square**0.5, 6) for figure, square in squares.items()}


def relative(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the error of tensors taken together."""
    both = [torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (got, wanted)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def solved(shape: Shape, recipe: Mapping[str, Any], seed: int) -> dict[str, list[Tensor]]:
    """Return the output and the gradients of the layer under a precision recipe, by figure."""
    layer_case = LayerCase(
        tokens=(shape.tokens,),
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        dim=shape.dim,
        expert_dim=shape.expert_dim,
        row_alignment=ROW_ALIGNMENT,
        parts={"precision": dict(recipe)},
    )
    layer, shared = build_layer(layer_case)
    initialise(layer, seed=seed, std=lambda name: (shape.expert_dim if "down" in name else shape.dim) ** -0.5)
    x_TD, probe_TD = (tensor.to(layer_case.dtype) for tensor in drawn(shape, seed))
    ids = torch.zeros(1, shape.tokens, dtype=torch.int64)
    x_TD.requires_grad_()
    out_TD, _ = layer(x_TD, keyed(Batch(ids_BS=ids, labels_BS=ids, seeds_B=torch.tensor([seed]))))
    (out_TD * probe_TD).sum(dtype=torch.float32).backward()
    shared.close()
    assert x_TD.grad is not None
    found: dict[str, list[Tensor]] = {figure: [] for figure in FIGURES} | {"out": [out_TD.detach()], "x": [x_TD.grad]}
    for piece in canonical_parameters(layer):
        assert piece.parameter.grad is not None
        (figure,) = (one for one in FIGURES[2:] if f"{one}_proj" in piece.name or piece.name.startswith(one))
        found[figure].append(piece.of(piece.parameter.grad))
    return found


def drawn(shape: Shape, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the gradient of the output, (T, D), exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    x_TD, probe_TD = torch.randn(2, shape.tokens, shape.dim, generator=generator).bfloat16().float()
    if shape.outliers:
        x_TD[:, ::100] *= 64.0
    return x_TD, probe_TD


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a row for each recipe and shape; errors are in percent."""
    table = Table(title="errors against fp32 in percent: output, and gradients of tokens and weights")
    for heading in ("shape", "recipe"):
        table.add_column(heading)
    for heading in FIGURES:
        table.add_column(heading, justify="right")
    for result in results:
        for name, found in result["errors"].items():
            figures = (f"{100 * found[figure]:.2f}" for figure in FIGURES)
            table.add_row(result["shape"]["name"], name, *figures)
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
