"""Speedup of an MoE layer in eight or four bits: a recipe with backend torch against bf16, forward and backward.

Correctness is checked first. Every product of the experts is compared with the same codes dequantized and multiplied
in fp32. The layer's error against fp32 may be hardly larger than that of emulation. Both layers run in one process on
the same weights and tokens and alternate; a time is the median over rounds. A recipe whose operands this GPU does not
multiply is named and left out.

``--dry`` runs the same code on a CPU with a small shape, where the backend is emulation, too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, get_args

import torch
from attrs import asdict
from torch import Tensor

import goal
import moefw
import record
from moe_layer import TINY, Layer, Shape, model_context, off, relative
from moefw.core.contracts import Precision
from moefw.core.records import GemmPass, Role, RowGroups
from moefw.plugins.precision.quantized.gpus import BLOCKS_OF_128, MXFP8, NVFP4, TENSORS, Gpus
from moefw.runtime.compute.grouped_mm import grouped_mm
from timing import device_to_measure, race, racing

RECIPES: Mapping[str, Gpus] = {"fp8-blockwise": BLOCKS_OF_128, "fp8-tensor": TENSORS, "mxfp8": MXFP8, "nvfp4": NVFP4}
WARM_UP = 5
GOAL = 1.30
ALLOWED = {"product": 1e-3, "of_emulated": 1.05}
"""Relative error (norm of the difference over the norm) against emulation; error against fp32 over emulation's."""
ALLOWED_LAYER = {"fp8-blockwise": 0.12, "fp8-tensor": 0.15, "mxfp8": 0.12, "nvfp4": 0.4}
"""Relative error against fp32, by recipe: a third more than emulation has in ``results/precision_error.json``."""
DEEPSEEK = Shape(tokens=8192, dim=7168, expert_dim=2048, num_experts=8, top_k=2)
"""The experts of DeepSeek-V3 on one of 32 ranks, with 2,048 rows each."""


def main() -> None:
    """Measure each recipe, and write them to ``fp8_layer.json`` one by one. Exits with 1 if products are wrong."""
    parser = racing(__doc__, rounds=30)
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    given = parser.parse_args()
    device = device_to_measure(dry=given.dry)
    found: dict[str, Any] = {}
    for recipe in given.recipe:
        found[recipe] = measure_if_multiplied(device, given.rounds, recipe, dry=given.dry)
        ratio = found.get("fp8-blockwise", {}).get("ratio")
        goals = [goal.at_least("12 fp8-blockwise over own bf16, 16,384 rows, fwd+bwd", ratio, GOAL)]
        path = record.write("fp8_layer", {"recipes": found, "goals": goals}, dry=given.dry)
    print(path)
    sys.exit(any(one["wrong"] for one in found.values()))


def measure_if_multiplied(device: torch.device, rounds: int, recipe: str, *, dry: bool) -> dict[str, Any]:
    """Return and print what a recipe measures, or why this GPU refuses it."""
    try:
        if not dry:
            RECIPES[recipe].require(device)
    except moefw.PlanError as refusal:
        print(f"{recipe}: {refusal}")
        return {"refused": str(refusal), "wrong": []}
    found = measure(device, TINY if dry else DEEPSEEK, rounds, recipe, dry=dry)
    products, errors, ms = (found[name] for name in ("products", "errors", "ms"))
    print(f"{recipe}: products off by {max(products.values()):.1e}, layer by {max(errors.values()):.2%}")
    print(f"bf16 {ms['bf16']:.2f} ms, {recipe} {ms[recipe]:.2f} ms: {found['ratio']:.2f}x", flush=True)
    return found


def measure(device: torch.device, shape: Shape, rounds: int, recipe: str, *, dry: bool) -> dict[str, Any]:
    """Return errors of products and of the layer, those not allowed, times in milliseconds and their ratio."""
    mine = choice(recipe, "emulate" if dry else "torch")
    products = product_errors(device, shape, mine)
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
    }


def choice(recipe: str, backend: str) -> dict[str, Any]:
    """Return a spec's precision, with the first layer, here the only one, which some recipes leave out by default."""
    return {"use": recipe, "backend": backend, "keep_bf16": []}


def product_errors(device: torch.device, shape: Shape, precision: Mapping[str, Any]) -> dict[str, float]:
    """Return the error of each product of the first GEMM against emulation, for the same operands."""
    both = (precision, choice(precision["use"], "emulate"))
    contexts = [model_context(one, device, shape) for one in both]
    mine, emulated = (context.at(0).recipe("moe.experts") for context in contexts)
    generator = torch.Generator(device).manual_seed(0)
    each = -(-shape.tokens * shape.top_k // shape.num_experts // 128) * 128
    ends_e = torch.arange(1, shape.num_experts + 1, device=device, dtype=torch.int32) * each
    sizes = {"x": (int(ends_e[-1]), shape.dim), "grad": (int(ends_e[-1]), shape.expert_dim)}
    drawn = {name: torch.randn(size, device=device, generator=generator).bfloat16() for name, size in sizes.items()}
    drawn["weight"] = torch.randn(shape.num_experts, shape.expert_dim, shape.dim, device=device, generator=generator)

    def product(recipe: Precision, during: GemmPass) -> Tensor:
        rows = RowGroups(ends_e=ends_e)

        def operand(name: str, role: Role) -> Any:
            return recipe.quantize(drawn[name], role=role, during=during, rows=None if role == "weight" else rows)

        if during == "fprop":
            return grouped_mm(operand("x", "input"), operand("weight", "weight").mT, ends_e).bfloat16()
        if during == "dgrad":
            return grouped_mm(operand("grad", "grad"), operand("weight", "weight"), ends_e).bfloat16()
        return grouped_mm(operand("grad", "grad").mT, operand("x", "input"), ends_e).bfloat16()

    return {during: relative(product(mine, during), product(emulated, during)) for during in get_args(GemmPass)}


if __name__ == "__main__":
    main()
