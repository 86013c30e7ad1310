"""What a checkpoint of 256 MB costs a run: training that waits for it, beside a save while steps go on.

Each round trains steps without a save, saves while training waits, and then trains steps beside a save until it is
settled. The time for which that blocks training is told as a share of the save that training waits for; how much longer
steps take meanwhile is told, too. Results go to ``benchmarks/results/saves.json``.

    python benchmarks/saves.py [rounds]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import record
from moefw.compose.optimizer import build_optimizer
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.training import checkpoint
from moefw.training.engine import Engine, StepResult, Votes

SIZES: Mapping[str, int] = {
    "vocab_size": 512,
    "dim": 512,
    "num_layers": 3,
    "num_dense_layers": 1,
    "dense_dim": 1024,
    "num_experts": 16,
    "expert_dim": 368,
    "shared_expert_dim": 368,
}
"""Of a model whose weights, and two moments of each, are 256 MB in fp32."""
TRAIN = {"steps": 100, "tokens_per_step": 2048, "micro_batch": 4, "seq_len": 256, "lr": 1e-3}
PLAIN_STEPS = 3
"""Steps without a save in each round."""


def main(
    rounds: int = 5, *, sizes: Mapping[str, int] = SIZES, train: Mapping[str, Any] = TRAIN, dry: bool = False
) -> dict[str, Any]:
    """Measure, print, write, and return what was measured."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # a disk, where /tmp may be memory
        measured = Saves(Path(folder), sizes, train).measure(rounds)
    print(measured)
    print(record.write("saves", {"rounds": rounds, **measured}, dry=dry))
    return measured


@contextmanager
def no_clock(*_: object) -> Iterator[None]:
    """Return a clock that measures nothing."""
    yield


class Saves:
    """A model on one rank, whose checkpoints go into a folder."""

    def __init__(self, folder: Path, sizes: Mapping[str, int], train: Mapping[str, Any]) -> None:
        parts = {"gemm": {"use": "grouped"}, "train": dict(train)}
        layer_case = whole_model(1, parts=parts, plugins=(), sizes=dict(sizes))
        model, self.assembly, self.layout, shared = open_model(layer_case)
        optimizer = build_optimizer(self.assembly, model, self.layout, torch.device("cpu"), shared)
        self.saver = checkpoint.Saver(folder, model, optimizer, self.layout, keep=1)
        self.engine = Engine.of(model, optimizer, self.layout, self.assembly.spec.train, beside=self.saver)
        self.steps = 0

    def measure(self, rounds: int) -> dict[str, Any]:
        """Return the medians of all rounds; the first round, which allocates, is not among them."""
        found = [self._round() for _ in range(rounds + 1)][1:]
        medians = {name: median(each[name] for each in found) for name in found[0]}
        return {
            "bytes": int(medians["bytes"]),
            "waiting_s": round(medians["waiting_s"], 3),
            "blocked_s": round(medians["blocked_s"], 4),
            "blocked_share": round(median(each["blocked_s"] / each["waiting_s"] for each in found), 4),
            "step_s": round(medians["step_s"], 3),
            "step_beside_save_s": round(medians["beside_s"], 3),
            "steps_beside_save": medians["num_beside"],
            "slowdown_of_steps": round(median(each["beside_s"] / each["step_s"] for each in found) - 1, 3),
        }

    def _round(self) -> dict[str, float]:
        plain = [self._step()[0] for _ in range(PLAIN_STEPS)]
        waited = self.saver.save(self.steps, checkpoint.Origin())
        self._step()
        self.saver.begin(self.steps, checkpoint.Origin())
        votes = Votes()
        beside = []
        while not votes.decided(self.layout.plan.world):
            seconds, result = self._step()
            beside.append(seconds)
            votes = result.votes
        saved = self.saver.settled()
        return {
            "bytes": saved.nbytes,
            "waiting_s": waited.blocked_s,
            "blocked_s": saved.blocked_s,
            "step_s": median(plain),
            "beside_s": sum(beside) / len(beside),
            "num_beside": len(beside),
        }

    def _step(self) -> tuple[float, StepResult]:
        """Return the seconds of a step, and its result."""
        self.steps += 1
        batches = global_batch(self.assembly, self.layout, self.steps)
        began_s = time.perf_counter()
        result = self.engine.step(batches, 1e-3, no_clock)
        return time.perf_counter() - began_s, result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
