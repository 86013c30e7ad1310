"""The MoE layer on a CPU, forward and backward, beside its matrix products alone and beside Hugging Face.

The ceiling is the six products of the experts by ``torch.mm``, one expert after the other, with equal rows, on the same
operands, which caches may hold. Beside it stand the same products on operands and results of each expert's own, which
is what a layer cannot avoid. Shares are of the ceiling, in three figures: fp32; bf16 with weights and gradients in
bf16; and bf16 with fp32 masters, a step of four micro-batches whose copies of weights and fp32 sums of gradients are
timed, too. Hugging Face's layer is that of Qwen3-MoE with ``grouped_mm``; with masters it casts in each micro-batch, as
autograd does. All ways of a shape alternate in one process, whose C library keeps freed pages as in the ranks of
``moefw train``. Tokens change in every round, as in training, so the rows of experts do, too. A figure is the median
over seeds. Outputs are compared with Hugging Face's by the median token, since its router computes in bf16 and so
chooses other experts for some.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor
from torch.func import functional_call

import goal
import record
from moe_layer import TINY, Layer, Shape
from moefw.runtime.compute.weights import shared_by_micro_batches
from peers import Peer, hugging_face, stacked
from timing import Way, as_a_rank_on_a_cpu, race

SHAPES: Final = [
    Shape(tokens=tokens, dim=dim, expert_dim=expert_dim, num_experts=experts, top_k=top_k)
    for dim, expert_dim, experts, top_k, tokens in (
        (2048, 768, 16, 8, 1024),
        (1024, 256, 64, 8, 2048),
        (1024, 2048, 8, 2, 2048),
        (512, 512, 64, 4, 4096),
        (1024, 512, 32, 4, 4096),
        (256, 256, 16, 4, 4096),
    )
]
MICRO_BATCHES: Final = 4
SEEDS: Final = 3
WARM_UP: Final = 3
"""Rounds before those that count: oneDNN compiles a kernel for each shape that it has not met."""
CEILING = "products"
OWN = "products on own operands"
WANTED: Final[Mapping[str, float]] = {"fp32": 0.85, "bf16": 0.70}
ALLOWED: Final[Mapping[str, float]] = {"fp32": 1e-5, "bf16": 0.02, "masters": 0.02}
"""Relative difference of the median token's output, by figure."""
Inputs = Sequence[Tensor]
Figure = tuple[dict[str, Way], Inputs, float]
"""All ways, the tokens of each layer, and the relative difference of their outputs."""


def main() -> None:
    """Measure, print and write ``cpu_layer.json``. Exits with 1 if an output is wrong."""
    as_a_rank_on_a_cpu()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--dry", action="store_true", help="a small shape, whose times say nothing")
    given = parser.parse_args()
    found = list[dict[str, Any]]()
    goals = list[goal.Goal]()
    wrong = False
    for shape in [TINY] if given.dry else SHAPES:
        for figure in given.figures:
            row = measured(figure, shape, rounds=given.rounds, seeds=1 if given.dry else SEEDS)
            found.append(row)
            wrong |= row["difference"] > ALLOWED[figure]
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            name = f"{figure}, {row['shape']}"
            if figure in WANTED:
                goals.append(goal.at_least(f"share of the products' rate, {name}", row["ours"], WANTED[figure]))
            goals.append(
                goal.at_least(f"times as fast as Hugging Face, {name}", row["ours"] / row["hugging face"], 1.0)
            )
    print(goal.table(goals))
    result = {"threads": torch.get_num_threads(), "rounds": given.rounds, "rows": found, "goals": goals}
    print(record.write("cpu_layer", result, dry=given.dry))
    sys.exit(wrong)


def measured(figure: str, shape: Shape, *, rounds: int, seeds: int) -> dict[str, Any]:
    """Return the shares of the ceiling's rate, and the largest difference of outputs."""
    shares: dict[str, list[float]] = {"ours": [], "hugging face": [], OWN: []}
    differences = []
    for seed in range(seeds):
        ways, inputs, difference = FIGURES[figure](shape, seed)
        taken = race(
            ways, rounds, warm_up=WARM_UP, before_round=partial(draw, inputs, torch.Generator().manual_seed(seed))
        )
        differences.append(difference)
        for name, each in shares.items():
            each.append(taken[CEILING] / taken[name])
    sizes = shape.dim, shape.expert_dim, shape.num_experts, shape.top_k, shape.tokens
    medians = {name: round(median(each), 3) for name, each in shares.items()}
    return {"figure": figure, "shape": str(sizes), **medians, "difference": float(f"{max(differences):.1e}")}


@torch.no_grad()
def draw(inputs: Inputs, generator: torch.Generator) -> None:
    """Give all layers the same new tokens."""
    drawn = torch.randn(inputs[0].shape, generator=generator)
    for x_TD in inputs:
        x_TD.copy_(drawn.bfloat16())


def in_one_dtype(dtype: torch.dtype, shape: Shape, seed: int) -> Figure:
    """Return a layer with weights and gradients of one dtype."""
    mine = layer("fp32" if dtype is torch.float32 else "bf16", shape, seed)
    mine.module.experts.to(dtype)
    peer = Peer(mine, shape, hugging_face(shape, stacked(mine, dtype)), dtype)

    def ours() -> None:
        clear([mine.x_TD, *mine.module.parameters()])
        with shared_by_micro_batches(mine.module.parameters()):
            mine.forward().backward(mine.probe_TD)

    ways = {"ours": ours, "hugging face": peer.run} | products(shape, dtype)
    return ways, (mine.x_TD, peer.x_TD), of_a_token(mine.forward(), peer.forward())


def with_masters(shape: Shape, seed: int) -> Figure:
    """Return a step of several micro-batches with fp32 weights and gradients, and products in bf16."""
    mine = layer("bf16", shape, seed)
    weights = dict[str, Tensor]()
    masters = stacked(mine, torch.float32)
    experts, _ = hugging_face(shape, stacked(mine))

    def cast(*given: Tensor) -> Tensor:
        out: Tensor = functional_call(experts, weights, given)
        return out

    peer = Peer(mine, shape, (cast, masters.values()))
    peer.router = torch.nn.Parameter(peer.router.float())
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}

    def theirs_forward() -> Tensor:
        weights.update({names[name]: master.bfloat16() for name, master in masters.items()})
        router, peer.router = peer.router, peer.router.bfloat16()  # type: ignore[assignment]
        try:
            return peer.forward()
        finally:
            peer.router = router

    def ours() -> None:
        clear([mine.x_TD, *mine.module.parameters()])
        with shared_by_micro_batches(mine.module.parameters()):
            for _ in range(MICRO_BATCHES):
                mine.forward().backward(mine.probe_TD)

    def theirs() -> None:
        clear([peer.x_TD, peer.router, *masters.values()])
        for _ in range(MICRO_BATCHES):
            theirs_forward().backward(peer.probe_TD)

    alone = products(shape, torch.bfloat16, times=MICRO_BATCHES)
    ways = {"ours": ours, "hugging face": theirs} | alone
    return ways, (mine.x_TD, peer.x_TD), of_a_token(mine.forward(), theirs_forward())


FIGURES: Final[Mapping[str, Callable[[Shape, int], Figure]]] = {
    "fp32": lambda shape, seed: in_one_dtype(torch.float32, shape, seed),
    "bf16": lambda shape, seed: in_one_dtype(torch.bfloat16, shape, seed),
    "masters": with_masters,
}


@torch.no_grad()
def of_a_token(ours_TD: Tensor, theirs_TD: Tensor) -> float:
    """Return the median over tokens of the norm of the difference over that of the output."""
    error_T = (ours_TD.double() - theirs_TD.double()).norm(dim=1) / theirs_TD.double().norm(dim=1)
    return float(error_T.median())


def layer(precision: str, shape: Shape, seed: int) -> Layer:
    """Return our layer."""
    return Layer({"use": precision}, torch.device("cpu"), shape, seed=seed)


def clear(tensors: Sequence[Tensor]) -> None:
    """Drop the gradients."""
    for tensor in tensors:
        tensor.grad = None


def products(shape: Shape, dtype: torch.dtype, times: int = 1) -> dict[str, Way]:
    """Return the six products of all experts with equal rows, on shared operands and on those of each expert."""
    own = [_pairs(shape, dtype) for _ in range(shape.num_experts)]

    def on_shared() -> None:
        for _ in range(times * shape.num_experts):
            for left, right in own[0]:
                torch.mm(left, right)

    def on_own() -> None:
        for _ in range(times):
            made = [torch.mm(*pair) for of_experts in zip(*own, strict=True) for pair in of_experts]
            made.clear()

    return {CEILING: on_shared, OWN: on_own}


def _pairs(shape: Shape, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return the operands of an expert: fprop, dgrad and wgrad of both layers."""
    rows = shape.rows // shape.num_experts
    width = shape.expert_dim
    w13 = torch.randn(2 * width, shape.dim).to(dtype)
    w2 = torch.randn(shape.dim, width).to(dtype)
    x, h, a = (torch.randn(rows, size).to(dtype) for size in (shape.dim, 2 * width, width))
    return [(x, w13.t()), (a, w2.t()), (x, w2), (h, w13), (h.t(), x), (x.t(), a)]


if __name__ == "__main__":
    main()
