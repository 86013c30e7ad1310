"""The built-in dispatchers on one device whose one rank is a process group, against the dense layer in fp64.

Collectives run (NCCL on a GPU, gloo on a CPU) although a layout of one rank would skip them. Output and all gradients
are compared for even and skewed routing, row counts that are no multiple of anything, and an expert without rows.
Backends that need a library are left out. Writes ``one_rank.json``; exits with 1 if a dispatcher is wrong.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import record
from dispatchers import DISPATCHERS
from moe_layer import draw, grad_of, off
from moefw.compose.build import ModelParts, Shared
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.contracts import Layout, LayoutPlan
from moefw.core.site import Machine
from moefw.core.stages import Batch
from moefw.runtime.naming import canonical_parameters
from moefw.testing.oracle import Rule, dense_moe
from timing import device_to_measure

TOKENS = 131
TOP_K = 2
MODEL = {"num_layers": 1, "dim": 64, "expert_dim": 32, "num_experts": 8, "top_k": TOP_K}
ALLOWED = 1e-4
"""Relative error of fp32 sums against fp64."""
SKEWS = ("even", "one", "starved")


@final
class OneRank(Layout):
    """One rank that has a process group for itself."""

    def __init__(self, plan: LayoutPlan, device: str) -> None:
        self.plan = plan
        self.device = device
        self.rank = 0
        self.ranks_per_node = 1

    def open(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Return the world."""
        return dist.group.WORLD

    def host_group(self) -> ProcessGroup | None:
        """Return None, as for any world of one rank."""
        return None


def main() -> None:
    """Check every dispatcher with every skew, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on a CPU")
    given = parser.parse_args()
    device = device_to_measure(dry=given.dry)
    backend = "gloo" if device.type == "cpu" else "nccl"
    bound = None if device.type == "cpu" else torch.device("cuda", 0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound)
    try:
        errors = {f"{name}, {skew}": check(name, skew, device) for name in DISPATCHERS for skew in SKEWS}
    finally:
        dist.destroy_process_group()
    wrong = [case for case, error in errors.items() if not error <= ALLOWED]
    for case, error in errors.items():
        print(f"{case:24} {error:.1e}")
    found = {"backend": backend, "errors": errors, "allowed": ALLOWED, "wrong": wrong}
    print(record.write("one_rank", found, dry=given.dry))
    sys.exit(bool(wrong))


def check(name: str, skew: str, device: torch.device) -> float:
    """Return the largest error of a dispatcher's layer over output and gradients."""
    tree = {"model": MODEL, "dispatch": DISPATCHERS[name], "routing": {"use": "topk", "score": "sigmoid"}}
    assembly = assemble_tree(tree, Marks("one rank"), defaults=defaults(), machine=Machine(device=device.type))
    shared = Shared()
    layer = ModelParts(assembly, OneRank(assembly.layout, device.type), device, shared).moe_layer(0)
    draw(layer)
    tip(layer.router.weight, skew)
    generator = torch.Generator().manual_seed(0)
    x_TD, probe_TD = torch.randn(2, TOKENS, layer.router.weight.shape[1], generator=generator)
    x_TD[:, 0] = x_TD[:, 0].abs() + 1.0
    there_TD = x_TD.to(device).requires_grad_()
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
    out_TD, _ = layer(there_TD, Batch(ids_BS=ids, labels_BS=ids))
    out_TD.backward(probe_TD.to(device))
    shared.close()
    got = {"out": out_TD.detach().cpu(), "x": grad_of(there_TD).cpu()}
    weights: dict[str, Any] = {}
    for piece in canonical_parameters(layer):
        weights[piece.name] = piece.of(piece.parameter.detach()).cpu()
        got[piece.name] = piece.of(grad_of(piece.parameter)).cpu()
    truth = dense_moe(weights, x_TD, probe_TD, Rule(top_k=TOP_K))
    wanted = {"out": truth.out_TD, **truth.grads}
    busy = {key: value for key, value in wanted.items() if value.any()}
    idle = [key for key in wanted.keys() - busy.keys() if got[key].any()]
    return max(float("inf") if idle else 0.0, *off(got, busy).values())


@torch.no_grad()
def tip(weight_ED: Tensor, skew: str) -> None:
    """Make every token prefer the first expert, or none the last. The first feature of all tokens is positive."""
    if skew == "one":
        weight_ED[0, 0] += 5.0
    if skew == "starved":
        weight_ED[-1, 0] -= 50.0


if __name__ == "__main__":
    main()
