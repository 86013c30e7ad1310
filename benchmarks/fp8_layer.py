"""Speedup of an MoE layer in eight or four bits: a recipe with backend torch against bf16, forward and backward.

Correctness is checked first. Every product of the experts is compared with the same codes dequantized and multiplied
in fp32. The layer's error against fp32 may be hardly larger than that of emulation. Both layers run in one process on
the same weights and tokens and alternate; a time is the median over rounds. Needs one GPU that multiplies the recipe's
operands, and reports if there is none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, get_args

import record
import torch
from attrs import asdict, frozen
from timing import race
from torch import Tensor

import moefw
from moefw.compose.build import ModelParts, Shared, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.context import ModelContext
from moefw.core.contracts import Precision
from moefw.core.records import Pass, Role, RowGroups
from moefw.core.site import Machine
from moefw.core.stages import Batch
from moefw.plugins.precision.quantized.gpus import BLOCKS_OF_128, MXFP8, NVFP4, TENSORS, Gpus
from moefw.runtime.compute.product import grouped_mm
from moefw.runtime.naming import canonical_parameters, initialise

RECIPES: Mapping[str, Gpus] = {"fp8-blockwise": BLOCKS_OF_128, "fp8-tensor": TENSORS, "mxfp8": MXFP8, "nvfp4": NVFP4}
WARM_UP = 5
GOAL = 1.30
ALLOWED = {"product": 1e-3, "of_emulated": 1.05}
"""Relative error (norm of the difference over the norm) against emulation; error against fp32 over emulation's."""
ALLOWED_LAYER = {"fp8-blockwise": 0.08, "fp8-tensor": 0.12, "mxfp8": 0.08, "nvfp4": 0.4}
"""Relative error against fp32, by recipe."""


@frozen(kw_only=True)
class Shape:
    """The experts of DeepSeek-V3 on one of 32 ranks, with 2,048 rows each."""

    dim: int = 7168
    expert_dim: int = 2048
    num_experts: int = 8
    top_k: int = 2
    tokens: int = 8192


def main() -> None:
    """Measure, print and write ``results/fp8_layer*.json``. Exits with 1 if products are wrong, 2 without the GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--recipe", choices=RECIPES, default="fp8-blockwise")
    given = parser.parse_args()
    gpus = RECIPES[given.recipe]
    try:
        if not torch.cuda.is_available():
            raise moefw.PlanError("torch sees no GPU.", "Run it on such a GPU, with a CUDA build of torch.")
        gpus.require(torch.device("cuda"))
    except moefw.PlanError as refusal:
        needed = " or ".join(gpus.capabilities)
        print(f"fp8_layer measures {given.recipe} on a GPU of compute capability {needed}: {refusal}", file=sys.stderr)
        sys.exit(2)
    measured = measure(torch.device("cuda"), Shape(), given.rounds, given.recipe)
    print(f"products off by {max(measured['products'].values()):.1e}, layer by {max(measured['errors'].values()):.2%}")
    ms = measured["ms"]
    print(f"bf16 {ms['bf16']:.2f} ms, {given.recipe} {ms[given.recipe]:.2f} ms: {measured['ratio']:.2f}x")
    print(record.write("fp8_layer" if given.recipe == "fp8-blockwise" else f"fp8_layer_{given.recipe}", measured))
    sys.exit(1 if measured["wrong"] else 0)


def measure(device: torch.device, shape: Shape, rounds: int, recipe: str = "fp8-blockwise") -> dict[str, Any]:
    """Return errors of products and of the layer, those not allowed, times in milliseconds and their ratio."""
    mine = choice(recipe, "torch")
    products = product_errors(device, shape, recipe)
    wanted = Layer({"use": "fp32"}, device, shape).figures()
    emulated = off(Layer(choice(recipe, "emulate"), device, shape).figures(), wanted)
    errors = off(Layer(mine, device, shape).figures(), wanted)
    wrong = [name for name, error in products.items() if error > ALLOWED["product"]]
    wrong += [name for name, error in errors.items() if error > ALLOWED_LAYER[recipe]]
    wrong += [name for name, error in errors.items() if error > ALLOWED["of_emulated"] * emulated[name]]
    layers = {"bf16": Layer({"use": "bf16"}, device, shape), recipe: Layer(mine, device, shape)}
    seconds = race({name: layer.run for name, layer in layers.items()}, rounds, warm_up=WARM_UP)
    return {
        "recipe": recipe,
        "shape": asdict(shape),
        "rounds": rounds,
        "allowed": {**ALLOWED, "layer": ALLOWED_LAYER[recipe]},
        "products": products,
        "errors": errors,
        "emulated": emulated,
        "wrong": wrong,
        "ms": {name: 1e3 * each for name, each in seconds.items()},
        "ratio": seconds["bf16"] / seconds[recipe],
        "goal": GOAL,
    }


def choice(recipe: str, backend: str) -> dict[str, Any]:
    """Return a spec's precision, with the first layer, here the only one, which some recipes leave out by default."""
    return {"use": recipe, "backend": backend, "keep_bf16": []}


def product_errors(device: torch.device, shape: Shape, recipe: str) -> dict[str, float]:
    """Return the error of each product of the first GEMM against emulation, for the same operands."""
    contexts = [model_context(choice(recipe, backend), device, shape) for backend in ("torch", "emulate")]
    mine, emulated = (context.at(0).recipe("moe.experts") for context in contexts)
    generator = torch.Generator(device).manual_seed(0)
    each = -(-shape.tokens * shape.top_k // shape.num_experts // 128) * 128
    ends_e = torch.arange(1, shape.num_experts + 1, device=device, dtype=torch.int32) * each
    sizes = {"x": (int(ends_e[-1]), shape.dim), "grad": (int(ends_e[-1]), shape.expert_dim)}
    drawn = {name: torch.randn(size, device=device, generator=generator).bfloat16() for name, size in sizes.items()}
    drawn["weight"] = torch.randn(shape.num_experts, shape.expert_dim, shape.dim, device=device, generator=generator)

    def product(recipe: Precision, during: Pass) -> Tensor:
        rows = RowGroups(ends_e=ends_e)

        def operand(name: str, role: Role) -> Any:
            return recipe.quantize(drawn[name], role=role, during=during, rows=None if role == "weight" else rows)

        if during == "fprop":
            return grouped_mm(operand("x", "input"), operand("weight", "weight").mT, ends_e).bfloat16()
        if during == "dgrad":
            return grouped_mm(operand("grad", "grad"), operand("weight", "weight"), ends_e).bfloat16()
        return grouped_mm(operand("grad", "grad").mT, operand("x", "input"), ends_e).bfloat16()

    return {during: relative(product(mine, during), product(emulated, during)) for during in get_args(Pass)}


def model_context(precision: Mapping[str, Any], device: torch.device, shape: Shape) -> ModelContext:
    """Return the context from which a model of one layer is built."""
    sizes = {name: size for name, size in asdict(shape).items() if name != "tokens"}
    tree = {"model": {"num_layers": 1, **sizes}, "precision": dict(precision)}
    assembly = assemble_tree(tree, Marks("fp8_layer"), defaults=defaults(), machine=Machine(device="cuda"))
    layout = open_layout(assembly, device.type)
    return ModelParts(assembly, layout, device, Shared())


class Layer:
    """The MoE layer in a precision, with its tokens."""

    def __init__(self, precision: Mapping[str, Any], device: torch.device, shape: Shape) -> None:
        context = model_context(precision, device, shape)
        recipe = context.at(0).recipe("moe.experts")
        self.module = context.moe_layer(0)
        initialise(self.module, seed=0, std=lambda name: (shape.expert_dim if "down" in name else shape.dim) ** -0.5)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(2, shape.tokens, shape.dim, generator=generator).bfloat16()
        self.x_TD, self.probe_TD = (tensor.to(device, recipe.residual_dtype) for tensor in drawn)
        self.x_TD.requires_grad_()
        ids = torch.zeros(1, shape.tokens, dtype=torch.int64, device=device)
        self.batch = Batch(ids_BS=ids, labels_BS=ids)

    def run(self) -> Tensor:
        """Run forward and backward with new gradients, and return the output."""
        self.module.zero_grad()
        self.x_TD.grad = None
        out_TD, _ = self.module(self.x_TD, self.batch)
        out_TD.backward(self.probe_TD)
        result: Tensor = out_TD.detach()
        return result

    def figures(self) -> dict[str, Tensor]:
        """Return output and gradients by name, with those of all experts concatenated."""
        found = {"out": [self.run()], "x": [grad_of(self.x_TD)]}
        for piece in canonical_parameters(self.module):
            found.setdefault(piece.name.split(".")[-2], []).append(piece.of(grad_of(piece.parameter)))
        return {name: torch.cat([tensor.flatten().cpu() for tensor in tensors]) for name, tensors in found.items()}


def grad_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor."""
    assert tensor.grad is not None
    return tensor.grad


def off(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of each figure."""
    return {name: relative(got[name], wanted[name]) for name in wanted}


def relative(got: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of ``wanted``."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


if __name__ == "__main__":
    main()
