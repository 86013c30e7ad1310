"""Time that offloading costs, and the share of its copies that computation hides, in a model of several layers.

Two models with the same weights alternate in one process, one with the inputs of its norms in host memory between
forward and backward. Gradients are compared first, bit for bit: copies change nothing.

``--dry`` runs the same code on a CPU with a small model, whose times say nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import goal
import record
import traced
from moe_layer import draw, grad_of
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.core.stages import Batch
from timing import device_to_measure, race, racing

REGIONS = ["attn_norm", "mlp_norm"]
OFFLOAD = [{"use": "offload", "regions": REGIONS}]
MODEL = {"num_layers": 8, "dim": 2048, "vocab_size": 2048}
MODEL |= {"num_experts": 32, "top_k": 8, "expert_dim": 768}
ATTENTION = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128}
SMALL = {"num_layers": 2, "dim": 32, "vocab_size": 256}
SMALL |= {"num_experts": 4, "top_k": 2, "expert_dim": 32}
SMALL_ATTENTION = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
SEQUENCES = 2
POSITIONS = 4096
GOAL_HIDDEN = 0.95
GOAL_TIME = 1.02
WARM_UP = 3


class Step:
    """Forward and backward of a model on random tokens."""

    def __init__(self, memory: list[dict[str, Any]], device: torch.device, *, dry: bool) -> None:
        tree = {"model": SMALL if dry else MODEL, "attention": SMALL_ATTENTION if dry else ATTENTION}
        tree |= {"precision": {"use": "bf16"}, "memory": memory}
        assembly = assemble_tree(tree, Marks("offload"), defaults=defaults(), machine=Machine(device=device.type))
        self.shared = Shared()
        self.model = build_model(assembly, open_layout(assembly, device.type), device, self.shared)
        draw(self.model)
        positions = 32 if dry else POSITIONS
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(tree["model"]["vocab_size"], (2, SEQUENCES, positions), generator=generator).to(device)
        scale = torch.tensor(1.0 / (SEQUENCES * positions), device=device)
        self.batch = Batch(ids_BS=ids[0], labels_BS=ids[1], loss_scale=scale)

    def run(self) -> None:
        """Run forward and backward with new gradients."""
        self.model.zero_grad()
        out = self.model(self.batch)
        (out.loss_sum * self.batch.loss_scale).backward()

    def grads(self) -> list[Tensor]:
        """Return the gradients of a run."""
        self.run()
        return [grad_of(parameter).clone() for parameter in self.model.parameters()]


def main() -> None:
    """Compare, measure, print and write ``offload_overlap.json``. Exits with 1 if gradients differ."""
    given = racing(__doc__, rounds=20).parse_args()
    device = device_to_measure(dry=given.dry)
    memory = [{**OFFLOAD[0], "min_bytes": 1}] if given.dry else OFFLOAD
    steps = {"kept": Step([], device, dry=given.dry), "offloaded": Step(memory, device, dry=given.dry)}
    kept, again, offloaded = (steps[name].grads() for name in ("kept", "kept", "offloaded"))
    differing = sum(not torch.equal(a, b) for a, b in zip(kept, offloaded, strict=True))
    noisy = sum(not torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    del kept, again, offloaded
    seconds = race({name: step.run for name, step in steps.items()}, given.rounds, warm_up=WARM_UP)
    copies = traced.hidden_copies(steps["offloaded"].run)
    for step in steps.values():
        step.shared.close()
    goals = [
        goal.at_least("offload: share of its copies beside kernels", copies["hidden"], GOAL_HIDDEN),
        goal.at_most("offload: time over keeping", seconds["offloaded"] / seconds["kept"], GOAL_TIME),
    ]
    print(goal.table(goals))
    ms = {name: 1e3 * each for name, each in seconds.items()}
    measured = {"regions": REGIONS, "ms": ms, **copies, "gradients_that_differ": differing}
    print(record.write("offload_overlap", {**measured, "that_differ_anyway": noisy, "goals": goals}, dry=given.dry))
    sys.exit(differing > noisy)


if __name__ == "__main__":
    main()
