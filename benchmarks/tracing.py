"""What it costs a step of the quickstart to be traced, on two gloo ranks, in turns with and without a trace.

It is measured where the noise of the products does not hide it: with as many spans, in a model of half the width, on
sequences of two tokens. It is compared with the step of the quickstart itself. Of each kind of step those are compared
that are faster than nine in ten, as what else runs on a machine only makes steps slower; plain ones are run twice, to
show the uncertainty. The thread that writes counts. Exits with 1 if a trace takes 3 % of a step or more. Results go to
``benchmarks/results/tracing.json``.

    python benchmarks/tracing.py [pairs] [key=value ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import mean
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

TINY: Final = ("train.seq_len=2", "train.tokens_per_step=32", "model.dim=128")
USUAL_PAIRS: Final = 20
SPEC: Final = Path(__file__).parents[1] / "examples" / "quickstart-fp32.yaml"
RANKS: Final = 2
WARM_UP: Final = 3
AT_MOST: Final = 0.03


def main(pairs: int = 150, *overrides: str, dry: bool = False) -> bool:
    """Measure, print, write. Return whether a trace costs no more than it may."""
    pool = RankPool(RANKS)
    tiny, spans = measure(pool, pairs, *TINY, *overrides)
    usual, spans_of_usual = measure(pool, min(pairs, USUAL_PAIRS), *overrides)
    pool.close()
    assert spans == spans_of_usual, "steps of both sizes have the same spans"
    step_s = fast(usual["plain"])
    plain_s = (fast(tiny["plain"]) + fast(tiny["plain again"])) / 2
    trace_s = fast(tiny["traced"]) - plain_s
    measured: dict[str, Any] = {
        "trace_s": trace_s,
        "tiny_step_s": plain_s,
        "plain_ones_differ_by_s": abs(fast(tiny["plain"]) - fast(tiny["plain again"])),
        "step_s": step_s,
        "share": trace_s / step_s,
        "spans_of_step": spans,
    }
    print(f"a trace takes {1e3 * trace_s:.1f} ms, {measured['share']:.1%} of a step: {measured}")
    print(record.write("tracing", {"pairs": pairs, "overrides": list(overrides), **measured}, dry=dry))
    return bool(measured["share"] < AT_MOST)


def measure(pool: RankPool, pairs: int, *overrides: str) -> tuple[Mapping[str, Sequence[float]], float]:
    """Seconds of each step in each way, in the mean of the ranks, and the number of spans of a traced one."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = pool.run(seconds, RANKS, overrides, pairs, folder, timeout_s=1800.0)
        (spans, *_) = [len(rank.spans) / pairs for rank in read_ranks(Path(folder))]
    steps = {way: [mean(both) for both in zip(*(rank[way] for rank in by_rank), strict=True)] for way in by_rank[0]}
    return steps, spans


def fast(steps: Sequence[float]) -> float:
    """Seconds of a step that is faster than nine in ten."""
    return sorted(steps)[len(steps) // 10]


def seconds(overrides: tuple[str, ...], pairs: int, folder: str) -> dict[str, list[float]]:
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

    def timed(step: AbstractContextManager[Sections]) -> float:
        nonlocal number
        batches = global_batch(assembly, layout, number)
        begin = time.perf_counter()
        with step as sections:
            engine.step(batches, 1e-3, sections, number=number)
        clock.step_done()
        number += 1
        return time.perf_counter() - begin

    def plain() -> float:
        return timed(nullcontext(clock))

    def with_trace() -> float:
        return timed(traced(tracer, number, clock, optimizer=optimizer, is_sharded=False))

    ways = {"plain": plain, "traced": with_trace, "plain again": plain}
    for _ in range(WARM_UP):
        plain()
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(pairs):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            taken[way].append(ways[way]())
    file.close()
    shared.close()
    return taken


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if "=" not in word]
    sys.exit(0 if main(*numbers[:1] or [150], *[word for word in sys.argv[1:] if "=" in word]) else 1)
