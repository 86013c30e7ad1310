"""Bytes that an MoE layer saves for backward, and its speed, compared with Hugging Face's ``grouped_mm`` experts.

One process, one thread, one rank, bf16, the same tokens and weights. Modes alternate in an order that changes every
round. Bytes count all memory that is alive between forward and backward, including the input of the layer, without its
output and copies of weights. They are compared with 2TD + 4SF: the tokens, and gate and up of S = T*K rows, in bf16.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import record
from moefw.core.stages import Batch
from moefw.runtime.naming import canonical_parameters
from moefw.testing.layer_case import LayerCase, build_layer

SHAPES = (
    {"tokens": 1024, "dim": 2048, "expert_dim": 768, "experts": 16, "top_k": 8},
    {"tokens": 1024, "dim": 1024, "expert_dim": 256, "experts": 64, "top_k": 8},
    {"tokens": 1024, "dim": 1024, "expert_dim": 2048, "experts": 8, "top_k": 2},
)
"""A Qwen3-30B-A3B with fewer experts, many small experts, and few large ones."""
MODES: dict[str, list[str]] = {
    "keep": [],
    "recompute dispatch": ["dispatch"],
    "recompute dispatch and router": ["dispatch", "router"],
}
PEER = "Hugging Face grouped_mm"
GOAL = 1.02
ALLOWED_TIME = 1.02


class Alive(TorchDispatchMode):
    """Counts the memory that operators allocate, except matrices of experts."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and leaf.dim() < 3 and (made := StorageWeakRef(leaf.untyped_storage())) not in given:
                self._made[made] = leaf.untyped_storage().nbytes()
        return result

    def nbytes(self) -> int:
        """Return the bytes that are still allocated."""
        return sum(nbytes for made, nbytes in self._made.items() if not made.expired())


def main() -> None:
    """Measure, print and write ``results/saved_bytes.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [row for shape in SHAPES for row in measure(shape, rounds)]
    print(f"{'shape':38} {'mode':30} {'MiB':>7} {'of 2TD+4SF':>11} {'of peer':>8} {'time':>6}")
    for row in rows:
        shape = " ".join(f"{key[0].upper()}{value}" for key, value in row["shape"].items())
        ratios = f"{row['of_minimum']:11.3f} {row['of_peer']:8.3f} {row['time']:6.3f}"
        print(f"{shape:38} {row['mode']:30} {row['bytes'] / 2**20:7.1f} {ratios}")
    print(f"time is against our fastest mode, round by round; goals: {GOAL} of 2TD+4SF, {ALLOWED_TIME} of the time")
    print(record.write("saved_bytes", {"rounds": rounds, "goal": GOAL, "allowed_time": ALLOWED_TIME, "rows": rows}))


def measure(shape: dict[str, int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each of our modes and for the peer."""
    tokens, dim, expert_dim, top_k = (shape[key] for key in ("tokens", "dim", "expert_dim", "top_k"))
    minimum = 2 * tokens * dim + 4 * tokens * top_k * expert_dim
    x_TD = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    layers = {name: Ours(shape, regions) for name, regions in MODES.items()}
    ways: dict[str, Callable[[], Tensor]] = {name: lambda layer=layer: layer(x_TD) for name, layer in layers.items()}
    ways[PEER] = peer(shape, layers["keep"].layer, x_TD)
    outs = {name: way().detach().float() for name, way in ways.items()}
    for name, out in outs.items():
        assert (out - outs["keep"]).norm() < 0.02 * outs["keep"].norm(), f"{name} computes something else"
    nbytes = {name: 2 * tokens * dim + held(way) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            x_TD.grad = None
            began = time.process_time()
            ways[name]().sum(dtype=torch.float32).backward()
            seconds[name].append(time.process_time() - began)
    times = {name: median(each) for name, each in seconds.items()}
    fastest = seconds[min(MODES, key=lambda name: times[name])]
    return [
        {
            "shape": shape,
            "mode": name,
            "bytes": nbytes[name],
            "of_minimum": round(nbytes[name] / minimum, 4),
            "of_peer": round(nbytes[name] / nbytes[PEER], 4),
            "seconds": round(times[name], 4),
            "time": round(median(mine / best for mine, best in zip(seconds[name], fastest, strict=True)), 3),
        }
        for name in ways
    ]


class Ours(nn.Module):
    """MoE layer of a shape that recomputes the given regions."""

    def __init__(self, shape: dict[str, int], regions: list[str]) -> None:
        super().__init__()
        memory = [{"use": "recompute", "regions": regions}] if regions else []
        parts = {"precision": {"use": "bf16"}, "memory": memory, "routing": {"use": "topk"}}
        self.layer, self.shared = build_layer(
            LayerCase(
                tokens=(shape["tokens"],),
                dim=shape["dim"],
                expert_dim=shape["expert_dim"],
                num_experts=shape["experts"],
                top_k=shape["top_k"],
                parts=parts,
            )
        )
        ids = torch.zeros(1, shape["tokens"], dtype=torch.int64)
        self.batch = Batch(ids_BS=ids, labels_BS=ids)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return ``(T, D)``."""
        out_TD: Tensor = self.layer(x_TD, self.batch)[0]
        return out_TD


def peer(shape: dict[str, int], layer: nn.Module, x_TD: Tensor) -> Callable[[], Tensor]:
    """Return Hugging Face's layer with the same weights in bf16."""
    config = Qwen3MoeConfig(
        hidden_size=shape["dim"],
        moe_intermediate_size=shape["expert_dim"],
        num_experts=shape["experts"],
        num_experts_per_tok=shape["top_k"],
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config)
    mine = {piece.name: piece.of(piece.parameter).detach() for piece in canonical_parameters(layer)}
    with torch.no_grad():
        block.gate.weight.copy_(mine["router.weight"])
        for expert in range(shape["experts"]):
            gate, up, down = (mine[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            block.experts.gate_up_proj[expert].copy_(torch.cat([gate, up]))
            block.experts.down_proj[expert].copy_(down)
    block.bfloat16()
    return lambda: block(x_TD.unsqueeze(0)).squeeze(0)


def held(way: Callable[[], Tensor]) -> int:
    """Return the bytes that are held between forward and backward, without the input."""
    with Alive() as alive:
        out = way()
    graph = out.sum()  # holds the saved tensors, but not the output
    del out
    nbytes = alive.nbytes()
    del graph
    return nbytes


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


if __name__ == "__main__":
    main()
