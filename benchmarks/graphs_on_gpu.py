"""Steps that are replayed as a graph of the GPU, beside eager ones: the same bits, and the time of a step.

Each way is a model with tokens of its own for every step. Gradients and sums of ten replays are compared with those of
eager passes on the same tokens first. Then whole steps of two engines on the same model alternate; a time is the median
over rounds. ``pool`` is what the allocator holds for the graph. Exits with 1 if a bit differs.

    python benchmarks/graphs_on_gpu.py [--rounds N] [--dry]

``--dry`` runs small shapes on a CPU, which has no graphs: both ways are eager then.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

import goal
import record
from moe_layer import draw
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import MoefwError
from moefw.core.site import Machine
from moefw.core.stages import Batch
from moefw.runtime.graphs import CudaGraphs
from moefw.training.engine import Engine
from moefw.training.graphed_run import WARM_UP
from timing import device_to_measure, race, racing

REPLAYS: Final = 10
QUICKSTART: Final = {
    "model": {"preset": "qwen3-moe-tiny", "vocab_size": 2048, "mtp_layers": 0},
    "routing": {
        "use": "topk",
        "score": "sigmoid",
        "balance": [{"kind": "expert_bias", "rate": 0.02}, {"kind": "aux_loss", "coeff": 0.005}],
    },
}
WIDE: Final = {
    "model": {"num_layers": 2, "dim": 2048, "vocab_size": 2048, "num_experts": 128, "top_k": 8, "expert_dim": 768},
    "attention": {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128},
}
SMALL: Final = {
    "model": {"num_layers": 2, "dim": 32, "vocab_size": 256, "num_experts": 4, "top_k": 2, "expert_dim": 32},
    "attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
}
BUDGET: Final = {"dispatch": {"use": "alltoall", "rank_capacity": 1.0, "on_overflow": "rerun"}}
FEW: Final = "1,024 tokens of 128 wide experts"
FP8: Final = {"use": "fp8-blockwise", "backend": "torch", "keep_bf16": []}
WAYS: Final[Mapping[str, tuple[Mapping[str, Any], tuple[int, int, int]]]] = {
    "quickstart": (QUICKSTART, (2, 8, 128)),
    "quickstart, recomputed": (
        {**QUICKSTART, "memory": [{"use": "recompute", "regions": ["attention", "experts"]}]},
        (2, 8, 128),
    ),
    "quickstart, stashed": (
        {**QUICKSTART, **BUDGET, "memory": [{"use": "paged-stash", "regions": ["experts"]}]},
        (2, 8, 128),
    ),
    FEW: (WIDE, (1, 1, 1024)),
    "the same in fp8-blockwise": ({**WIDE, **BUDGET, "precision": FP8}, (1, 1, 1024)),
}
"""The spec, and micro-batches a step, sequences of each and their positions."""
GOAL_QUICKSTART: Final = 5.0
GOAL_WIDE: Final = 1.2


class Steps:
    """A model, an engine that runs eagerly and one that replays, and tokens for any step."""

    def __init__(self, spec: Mapping[str, Any], shape: tuple[int, int, int], device: torch.device) -> None:
        tree = {"precision": {"use": "bf16"}, "dispatch": {"use": "alltoall"}, **spec}
        machine = Machine(device=device.type)
        self.assembly = assemble_tree(tree, Marks("graphs"), defaults=defaults(), machine=machine, trains=True)
        self.layout = open_layout(self.assembly, device.type)
        self.shared = Shared()
        self.model = build_model(self.assembly, self.layout, device, self.shared)
        draw(self.model)
        self.device = device
        self.shape = shape
        self.vocab_size = getattr(self.assembly.parts.model, "vocab_size", 2)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        graphs = CudaGraphs() if device.type == "cuda" else None
        self.eager, self.graphed = (
            Engine(self.model, optimizer, self.layout, clip_norm=1.0, graphs=each) for each in (None, graphs)
        )

    def batches(self, step: int) -> Sequence[Batch]:
        """The micro-batches of a step."""
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(self.vocab_size, (2, *self.shape), generator=generator).to(self.device)
        scale = torch.tensor(1.0 / ids[0].numel(), device=self.device)
        return [Batch(ids_BS=own, labels_BS=label, loss_scale=scale) for own, label in zip(*ids, strict=True)]

    def passes(self, engine: Engine, step: int) -> dict[str, Tensor]:
        """Gradients and sums of the passes of a step."""
        self.model.zero_grad()
        tally = engine.run(self.batches(step), lambda *_: nullcontext())
        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        found["loss"] = tally.loss
        for number, layer in tally.layers.items():
            found |= {f"{name} of layer {number}": value for name, value in layer.stats.items()}
        return {name: value.clone() for name, value in found.items() if value is not None}

    def differing(self) -> list[str]:
        """What differs between eager and replayed passes of ten steps."""
        wrong = []
        for step in range(WARM_UP + REPLAYS):
            wanted = self.passes(self.eager, step)
            found = self.passes(self.graphed, step)
            wrong += [f"step {step}: {name}" for name in wanted if not torch.equal(wanted[name], found[name])]
        return wrong

    def step(self, engine: Engine) -> None:
        """Run a whole step."""
        engine.step(self.own, 0.0, lambda *_: nullcontext())

    def measure(self, rounds: int) -> dict[str, Any]:
        """Differences, and the time of a step in milliseconds both ways."""
        before = reserved()
        wrong = self.differing()
        pool = reserved() - before
        self.own = [replace(batch, loss_scale=None) for batch in self.batches(0)]
        ways = {"eager": lambda: self.step(self.eager), "replayed": lambda: self.step(self.graphed)}
        seconds = race(ways, rounds, warm_up=WARM_UP + 2)
        ratio = seconds["eager"] / seconds["replayed"]
        ms = {name: round(1e3 * each, 4) for name, each in seconds.items()}
        return {"differing": wrong, "ms": ms, "ratio": ratio, "pool_bytes": pool}


def reserved() -> int:
    """Bytes that the allocator holds for the GPU, without those that are free; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def main() -> None:
    """Measure each way, print it and write ``graphs_on_gpu.json`` after each. Exits with 1 if a bit differs."""
    given = racing(__doc__, rounds=20).parse_args()
    device = device_to_measure(dry=given.dry)
    found: dict[str, Any] = {}
    for way, (spec, shape) in WAYS.items():
        if given.dry:
            spec, shape = {**spec, **SMALL, "precision": {"use": "fp32"}}, (shape[0], 1, 32)
        found[way] = told = measured(spec, shape, device, given.rounds)
        if "failed" in told:
            print(f"{way}: {told['failed']}", flush=True)
        else:
            print(f"{way}: {len(told['differing'])} tensors differ, {told['ms']} ms, {told['ratio']:.2f}x", flush=True)
        path = record.write("graphs_on_gpu", {"ways": found, "goals": goals(found)}, dry=given.dry)
    print(goal.table(goals(found)))
    print(path)
    sys.exit(any(not is_same(one) for one in found.values()))


def measured(spec: Mapping[str, Any], shape: tuple[int, int, int], device: torch.device, rounds: int) -> dict[str, Any]:
    """What a way measures, or why it failed, which says nothing of the others."""
    steps = Steps(spec, shape, device)
    try:
        return steps.measure(rounds)
    except (MoefwError, RuntimeError) as failure:
        traceback.print_exc()
        return {"failed": str(failure)[:500]}
    finally:
        steps.shared.close()


def is_same(one: Mapping[str, Any]) -> bool:
    """Whether a way was measured and no bit of it differs."""
    return one.get("differing") == []


def goals(found: Mapping[str, Mapping[str, Any]]) -> list[goal.Goal]:
    """The goals of what was measured."""
    ratios = {way: one.get("ratio") for way, one in found.items()}
    return [
        goal.at_least(
            "replayed steps: ways with the bits of eager ones", float(all(map(is_same, found.values()))), 1.0
        ),
        goal.at_least("replayed steps over eager ones: quickstart", ratios.get("quickstart"), GOAL_QUICKSTART),
        goal.at_least("replayed steps over eager ones: 1,024 tokens", ratios.get(FEW), GOAL_WIDE),
    ]


if __name__ == "__main__":
    main()
