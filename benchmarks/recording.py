"""What it costs a step to record it: its line, the load of experts, norms by part and the entropy of routers.

Steps of the quickstart on one rank run in threes, on one batch, in one process: without all of this, with it, and
without it once more. The last of them is a control: its ratio to the first shows by how much equal steps differ here.
As they may differ by more than recording costs, each part is also timed by itself, as often as a step runs it; their
sum over a step is the share that is told. Results go to ``benchmarks/results/recording.json``.

    python benchmarks/recording.py [rounds] [key=value ...]
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import record
from moefw.commands import specs
from moefw.compose.optimizer import build_optimizer
from moefw.core.stages import Batch
from moefw.runtime import layer as moe_layer
from moefw.runtime.parallel import gradients
from moefw.runtime.parallel.holders import STAGE
from moefw.runtime.parallel.parts import PARTS
from moefw.runtime.router_entropy import entropy_of_scores
from moefw.training.clock import StepClock
from moefw.training.engine import Engine, StepResult
from moefw.training.feed import feed_of
from moefw.training.full_disk import written
from moefw.training.learning_rate import learning_rate
from moefw.training.records.run_log import RunLog
from moefw.training.session import Session, open_session
from moefw.training.step_record import record_of
from moefw.training.world import ALONE

SPEC = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
WARM_UP = 3
REPEATS = 100
"""How often each part is timed by itself."""


def main(rounds: int = 40, *overrides: str, dry: bool = False) -> dict[str, Any]:
    """Measure, print, write, and return what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        assembly = specs.read(str(SPEC), ["parallel={}", f"run.dir={folder}/run", *overrides])
        with open_session(assembly, ALONE) as session:
            measured = Steps(session, Path(folder) / "run").measure(rounds)
    print(measured)
    print(record.write("recording", {"rounds": rounds, "overrides": list(overrides), **measured}, dry=dry))
    return measured


class Steps:
    """Steps of a session, recorded in a folder or not."""

    def __init__(self, session: Session, run_dir: Path) -> None:
        self.session = session
        optimizer = build_optimizer(session.assembly, session.model, session.layout, session.device, session.shared)
        self.engine = Engine.of(session.model, optimizer, session.layout, session.assembly.spec.train)
        self.feed = feed_of(session)
        self.clock = StepClock()
        self.log = RunLog()
        run_dir.mkdir(parents=True)
        self.log.open(run_dir, keep_until=None, writing=written)
        self.step = 0
        self.lines = 0

    def measure(self, rounds: int) -> dict[str, Any]:
        """Return medians of steps, peaks of memory, and what each part takes of a step."""
        peaks = {}
        for name, way in (("off", self.unrecorded), ("on", self.recorded)):
            for _ in range(WARM_UP):
                self.step += 1
                way()
            peaks[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ways = {"off": self.unrecorded, "on": self.recorded, "control": self.unrecorded}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(rounds):
            self.step += 1
            for name in sorted(ways, reverse=turn % 2 == 1):
                taken[name].append(timed(ways[name]))
        wall, processor = ({name: median(pair[of] for pair in pairs) for name, pairs in taken.items()} for of in (0, 1))
        parts = self.parts()
        return {
            "wall_s": wall,
            "processor_s": processor,
            "processor_ratio": {name: ratio_of(taken[name], taken["off"]) for name in ("on", "control")},
            "more_peak_bytes": peaks["on"] - peaks["off"],
            "parts_processor_s": parts,
            "share_of_step": sum(parts.values()) / processor["off"],
        }

    def unrecorded(self) -> StepResult:
        """Train a step of which nothing is recorded but the sums that training needs."""
        with unmeasured():
            return self._trained()

    def recorded(self) -> None:
        """Train and record a step."""
        result = self._trained()
        self._write(result)

    def _write(self, result: StepResult) -> None:
        line = record_of(self.lines, 0.0, result)
        line["seconds"] = self.clock.step_done()
        self.log.step(line, result.layers, result.load_LE)
        self.lines += 1

    def _trained(self) -> StepResult:
        batches = list(self.feed.micro_batches(self.step))
        lr = learning_rate(self.session.assembly, self.step)
        return self.engine.step(batches, lr, self.clock)

    def parts(self) -> dict[str, float]:
        """Return the seconds of the processor that each part takes in a step."""
        batches = list(self.feed.micro_batches(self.step))
        result = self._trained()
        experts = self.session.assembly.site.dims.num_experts
        scores = [torch.rand((batch.ids_BS.numel(), experts), device=self.session.device) for batch in batches]
        norms = self.engine.gradients
        line = [timed(lambda: self._write(result))[1] for _ in range(REPEATS)]
        more = [timed(norms.norms)[1] - timed(lambda: one_norm(norms))[1] for _ in range(REPEATS)]
        return {
            "line and load": median(line),
            "norms by part": max(median(more), 0.0),
            "router entropy": median(timed(lambda: self._entropies(scores, batches))[1] for _ in range(REPEATS)),
        }

    def _entropies(self, scores: Sequence[Tensor], batches: Sequence[Batch]) -> None:
        """Compute what a step does: the entropy in each layer and micro-batch, and its sums."""
        for scores_TE, batch in zip(scores, batches, strict=True):
            for _ in self.session.assembly.layers:
                entropy_of_scores(scores_TE, batch.mask_T).double().add_(1.0)


def timed(way: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call, by the clock and of the processor."""
    wall, processor = time.perf_counter(), time.process_time()
    way()
    return time.perf_counter() - wall, time.process_time() - processor


def ratio_of(taken: Sequence[tuple[float, float]], of: Sequence[tuple[float, float]]) -> float:
    """Return the median over rounds of the processor's seconds in relation to those of another way."""
    return median(one / other for (_, one), (_, other) in zip(taken, of, strict=True))


@contextmanager
def unmeasured() -> Iterator[None]:
    """Leave out what is computed only to be recorded."""
    with ExitStack() as stack:
        for owner, name, without in (
            (moe_layer, "_with_entropy", lambda routing, mask_T: routing),
            (gradients.Gradients, "norms", one_norm),
        ):
            stack.enter_context(mock.patch.object(owner, name, without))
        yield


def one_norm(self: gradients.Gradients) -> Tensor:
    """Return the norm of the whole gradient, in the place of those of all parts, too."""
    squares = [
        gradients._squares(gradients._local(family.parameters)).sum() / family.copies for family in self.families
    ]
    square = torch.stack(squares).sum()
    group = self.layout.group("pp", *STAGE)
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt().expand(1 + len(PARTS))


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if "=" not in word]
    main(*numbers[:1] or [40], *[word for word in sys.argv[1:] if "=" in word])
