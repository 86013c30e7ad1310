"""What it costs a step to be traced: steps of the quickstart on two gloo ranks, in turns with and without a trace.

Steps differ by more than a trace costs, so the fastest tenth of each way is compared: what else runs on a machine only
makes steps slower. Seconds of the processor also count the thread that writes. Exits with 1 if a traced step takes 3 %
more by the clock than one that is not. Results go to ``benchmarks/results/tracing.json``.

    python benchmarks/tracing.py [pairs] [key=value ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

import record
from moefw.commands import specs
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.optimizer import build_optimizer
from moefw.runtime.naming import initialise
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch
from moefw.tracing.clocks import HostClock
from moefw.tracing.rank_file import Head, RankFile, read_ranks
from moefw.tracing.replaced import traced
from moefw.tracing.tracer import Sections, Tracer
from moefw.training.clock import StepClock
from moefw.training.engine import Engine

SPEC: Final = Path(__file__).parents[1] / "examples" / "quickstart-fp32.yaml"
RANKS: Final = 2
WARM_UP: Final = 3
AT_MOST: Final = 0.03


def main(pairs: int = 100, *overrides: str, dry: bool = False) -> bool:
    """Measure, print, write. Return whether a trace costs no more than it may."""
    pool = RankPool(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        by_rank = pool.run(seconds, RANKS, overrides, pairs, folder, timeout_s=1800.0)
        spans = [len(rank.spans) / pairs for rank in read_ranks(Path(folder))]
    pool.close()
    processor, by_clock = (steps_of(by_rank, of) for of in (0, 1))
    measured: dict[str, Any] = {
        "by_clock": {"step_s": fast(by_clock["plain"]) / RANKS, **more(by_clock)},
        "of_processor": {"step_s": fast(processor["plain"]) / RANKS, **more(processor)},
        "spans_of_step": spans,
    }
    told = measured["by_clock"]["more"]
    print(f"a traced step takes {told:.1%} more by the clock: {measured}")
    print(record.write("tracing", {"pairs": pairs, "overrides": list(overrides), **measured}, dry=dry))
    return bool(told <= AT_MOST)


Seconds = Sequence[float]
"""Of the processor, and by the clock."""


def steps_of(by_rank: Sequence[Mapping[str, Sequence[Seconds]]], of: int) -> Mapping[str, Sequence[float]]:
    """Seconds of each step in each way, of all ranks together."""
    return {
        way: [sum(rank[of] for rank in ranks) for ranks in zip(*(rank[way] for rank in by_rank), strict=True)]
        for way in by_rank[0]
    }


def fast(steps: Sequence[float]) -> float:
    """Seconds of a step that is faster than nine in ten."""
    return sorted(steps)[len(steps) // 10]


def more(steps: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """What a traced step takes more than plain ones, as a share, and by how much the two kinds of plain ones differ."""
    first, again = fast(steps["plain"]), fast(steps["plain again"])
    plain = (first + again) / 2
    return {"more": fast(steps["traced"]) / plain - 1.0, "plain_ones_differ_by": abs(again - first) / plain}


def seconds(overrides: tuple[str, ...], pairs: int, folder: str) -> dict[str, list[Seconds]]:
    """What each step of this rank takes: plain, traced, and plain again, the three in turns."""
    assembly = specs.read(str(SPEC), list(overrides), RANKS)
    layout = open_layout(assembly, "cpu")
    shared = Shared()
    model: Any = build_model(assembly, layout, torch.device("cpu"), shared)
    initialise(model, seed=0, std=model.init_std)
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    engine = Engine.of(model, optimizer, layout, assembly.spec.train)
    file = RankFile(Path(folder), Head(rank=layout.rank, world=RANKS, device="cpu", machine="one", met_ns=()))
    tracer = Tracer(HostClock(), file.write)
    clock = StepClock()
    number = 0

    def timed(step: AbstractContextManager[Sections]) -> Seconds:
        nonlocal number
        batches = global_batch(assembly, layout, number)
        begin = time.process_time(), time.perf_counter()
        with step as sections:
            engine.step(batches, 1e-3, sections, number=number)
        clock.step_done()
        number += 1
        return time.process_time() - begin[0], time.perf_counter() - begin[1]

    def plain() -> Seconds:
        return timed(nullcontext(clock))

    def with_trace() -> Seconds:
        return timed(traced(tracer, number, clock, optimizer=optimizer, is_sharded=False))

    ways = {"plain": plain, "traced": with_trace, "plain again": plain}
    for _ in range(WARM_UP):
        plain()
    taken: dict[str, list[Seconds]] = {way: [] for way in ways}
    for turn in range(pairs):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            taken[way].append(ways[way]())
    file.close()
    shared.close()
    return taken


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if "=" not in word]
    sys.exit(0 if main(*numbers[:1] or [100], *[word for word in sys.argv[1:] if "=" in word]) else 1)
