"""Share of the movements of experts that compute hides: in order, merged, merged with delayed weight gradients.

One step of a small MoE model runs on two gloo ranks, eight micro-batches, and is logged (``step_log.py``): compute, in
seconds of the thread's processor time, launches, waits, reads of metadata. The log is played on a virtual clock
(``virtual_clock.py``) on which one wire takes 0.3, 0.5 and 0.8 of the time of compute, shared out over movements by
their bytes. Exits with 1 unless merged passes hide at least 0.85 at 0.5, and twice the share of passes in order.

Printed, not judged: the same logs with the durations of DeepSeek-V3 (``deepseek_v3_ep64.yaml``), ends included; and
seconds by the clock under a wire that sleeps. Results go to ``benchmarks/results/overlap.json``.

    python benchmarks/overlap.py [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest import mock

import torch
from attrs import asdict, evolve, frozen
from ruamel.yaml import YAML
from torch import Tensor

import record
from moefw.runtime.communication.movement import Flight
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.training import micro_batches
from moefw.training.engine import Engine
from step_log import Event, StepLog, in_order
from virtual_clock import Replayed, replay

RANKS: Final = 2
MICRO_BATCHES: Final = 8
SIZES: Final[Mapping[str, int]] = {
    "dim": 256,
    "num_layers": 4,
    "num_dense_layers": 0,
    "num_experts": 8,
    "top_k": 2,
    "expert_dim": 512,
    "shared_expert_dim": 256,
    "vocab_size": 1024,
}
SEQ_LEN: Final = 256
WIRES: Final = (0.3, 0.5, 0.8)
"""Seconds of the wire, as shares of those of compute."""
JUDGED: Final = 0.5
AT_LEAST: Final = 0.85
TIMES: Final = 2.0
ORDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "in order": {},
    "merged": {"pipeline": {"use": "merged"}},
    "merged, delayed": {"pipeline": {"use": "merged"}, "train": {"delay_wgrads": True}},
}
PAGE: Final = Path(__file__).parents[1] / "docs" / "parallel-layouts.md"
BEGIN: Final = "<!-- written by benchmarks/overlap.py"
END: Final = "<!-- end of what benchmarks/overlap.py writes -->"
DEEPSEEK: Final = Path(__file__).with_name("deepseek_v3_ep64.yaml")


def case_of(order: str) -> LayerCase:
    """Case with the model of this benchmark."""
    parts: dict[str, Any] = {"dispatch": {"use": "alltoall"}, "parallel": {"experts": {"ep": RANKS}}, **ORDERS[order]}
    train = {**parts.pop("train", {}), "seq_len": SEQ_LEN, "tokens_per_step": RANKS * MICRO_BATCHES * SEQ_LEN}
    case = whole_model(RANKS, parts=parts, plugins=(), micro_batch=1, sizes=SIZES)
    return LayerCase(tokens=case.tokens, parts={**case.parts, "train": {**case.parts["train"], **train}}, plugins=())


@contextmanager
def opened(case: LayerCase) -> Iterator[tuple[Engine, Callable[[Any], Any], Any]]:
    """Yield an engine of the case, what runs a step with a clock on this rank, and the process group of rows."""
    model, assembly, layout, shared = open_model(case)
    run = micro_batches.by_schedule(model, delay_wgrads=assembly.spec.train.delay_wgrads)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), layout, clip_norm=None, run=run)
    batches = global_batch(assembly, layout, 0)
    yield engine, lambda clock: engine.step(batches, 0.0, clock), layout.group("ep", "etp")
    shared.close()


def untimed(section: str, *passes: object) -> nullcontext[None]:
    return nullcontext()


def logged(case: LayerCase, rounds: int) -> list[Event]:
    """Log of a step of this rank, with the median of each duration over all rounds."""
    logs: list[list[Event]] = []
    with opened(case) as (engine, step, group_of_rows):
        step(untimed)
        for _ in range(rounds):
            log = StepLog(group_of_rows)
            with log.logging(untimed, engine.optimizer) as clock:
                step(clock)
            logs.append(log.events)
    assert all(in_order(events) == in_order(logs[0]) for events in logs), "steps differ"
    return [evolve(same[0], seconds=median(event.seconds for event in same)) for same in zip(*logs, strict=True)]


def slept(case: LayerCase, rounds: int, seconds_a_byte: float) -> float:
    """Seconds of a step by the clock, the median of all rounds, where a wire of this speed sleeps in each wait."""
    wire_is_free = 0.0
    launch, wait = Flight.__init__, Flight.wait
    arrives: dict[int, float] = {}

    def launching(flight: Flight, start: Any, sent: Sequence[Tensor]) -> None:
        nonlocal wire_is_free
        launch(flight, start, sent)
        nbytes = sum(tensor.nbytes for tensor in flight.sent)
        wire_is_free = max(time.perf_counter(), wire_is_free) + nbytes * seconds_a_byte
        arrives[id(flight)] = wire_is_free

    def waiting(flight: Flight) -> list[Tensor]:
        buffers = wait(flight)
        time.sleep(max(0.0, arrives.pop(id(flight)) - time.perf_counter()))
        return buffers

    seconds = []
    with opened(case) as (_, step, _), mock.patch.multiple(Flight, __init__=launching, wait=waiting):
        step(untimed)
        for _ in range(rounds):
            begin = time.perf_counter()
            step(untimed)
            seconds.append(time.perf_counter() - begin)
    return median(seconds)


def on_wire(events: Sequence[Event], share: float) -> Replayed:
    """A log on a wire that takes ``share`` of the time of compute in all, shared out by bytes."""
    return replay(events, lambda event: event.nbytes * seconds_a_byte(events, share))


def seconds_a_byte(events: Sequence[Event], share: float) -> float:
    """Seconds in which a byte travels on such a wire."""
    compute = sum(event.seconds for event in events)
    return share * compute / sum(event.nbytes for event in events)


@frozen
class DeepSeek:
    """Durations of DeepSeek-V3: of each phase, and of each movement."""

    sizes: Mapping[str, Any]

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a micro-batch. The backward of a phase takes twice as long as its forward."""
        one = self.sizes
        dim, heads = one["dim"], one["heads"]
        query = dim * one["q_rank"] + one["q_rank"] * heads * (one["qk_nope_dim"] + one["qk_rope_dim"])
        keys = dim * (one["kv_rank"] + one["qk_rope_dim"]) + one["kv_rank"] * heads * (
            one["qk_nope_dim"] + one["v_dim"]
        )
        out = heads * one["v_dim"] * dim
        core = one["tokens"] / 2 * heads * (one["qk_nope_dim"] + one["qk_rope_dim"] + one["v_dim"])
        attention = query + keys + out + core
        expert = 3 * dim * one["expert_dim"]
        dense = attention + 3 * dim * one["dense_dim"]
        products = {
            "begin": one["dense_layers"] * dense,
            "attend": attention + dim * one["num_experts"],
            "receive": one["shared_experts"] * expert,
            "compute": one["top_k"] * expert,
            "collect": 0,
            "end": dim * one["vocab_size"],
        }
        forward = {name: 2 * count * one["tokens"] / (one["tflops"] * 1e12) for name, count in products.items()}
        return {**forward, **{f"{name}'": 2 * seconds for name, seconds in forward.items()}}

    def log(self, events: Sequence[Event]) -> list[Event]:
        """A log of as many layers whose phases take these times, each shared out as in the measured phase.

        Begin and end count by the share of layers that run, so that they are what they are in the whole model.
        """
        measured: Counter[str] = Counter()
        for event in events:
            measured[event.phase] += event.seconds
        ends = SIZES["num_layers"] / self.sizes["layers"]
        wanted = {
            name: seconds * MICRO_BATCHES * (ends if name.rstrip("'") in ("begin", "end") else SIZES["num_layers"])
            for name, seconds in self.phases().items()
        }
        return [
            evolve(event, seconds=event.seconds * wanted.get(event.phase, 0.0) / measured[event.phase])
            if event.seconds
            else event
            for event in events
        ]

    def play(self, events: Sequence[Event], calls: Mapping[str, float]) -> Replayed:
        """Play such a log with the times of a dispatcher's calls."""

        def travel(event: Event) -> float:
            # Rows go to their experts from attend and, in backward, from collect': its dual is that of combine.
            to_experts = event.phase in ("attend", "collect'")
            return calls["dispatch_us" if to_experts else "combine_us"] * 1e-6

        return replay(self.log(events), travel)


def main(rounds: int, *, dry: bool = False) -> bool:
    """Measure, print, write. Return whether merged passes hide what they promise."""
    pool = RankPool(RANKS)
    logs = {}
    for order in ORDERS:
        logs[order], *others = pool.run(logged, RANKS, case_of(order), rounds)
        assert all(in_order(events) == in_order(logs[order]) for events in others), "ranks differ"
    rows: list[dict[str, Any]] = []
    for order, events in logs.items():
        for share in WIRES:
            replayed = on_wire(events, share)
            rows.append({"order": order, "wire_share": share, **asdict(replayed), "hidden": replayed.hidden})
            print(f"wire {share} of compute, {order}: {replayed.hidden:.2f} hidden, {replayed.total:.3f} s a step")
    deepseek = DeepSeek(YAML(typ="safe").load(DEEPSEEK))
    real: list[dict[str, Any]] = []
    for dispatcher, calls in deepseek.sizes["movements"].items():
        for order in ("in order", "merged"):
            replayed = deepseek.play(logs[order], calls)
            real.append({"dispatcher": dispatcher, "order": order, **asdict(replayed), "hidden": replayed.hidden})
            share = replayed.wire / replayed.compute
            print(f"DeepSeek-V3, {dispatcher} ({share:.2f} of compute), {order}: {replayed.hidden:.2f} hidden")
    speed = seconds_a_byte(logs["in order"], JUDGED)
    clock = {order: median(pool.run(slept, RANKS, case_of(order), rounds, speed, timeout_s=600.0)) for order in ORDERS}
    print(", ".join(f"{order} {seconds:.3f} s" for order, seconds in clock.items()), "by the clock, wire asleep")
    pool.close()
    results = {"sizes": dict(SIZES), "seq_len": SEQ_LEN, "rounds": rounds, "virtual": rows}
    record.write("overlap", {**results, "deepseek_v3": real, "clock_s": clock}, dry=dry)
    if not dry:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + table(rows, real, record.commit()) + rest.partition(END)[2])
    hidden = {row["order"]: row["hidden"] for row in rows if row["wire_share"] == JUDGED}
    return hidden["merged"] >= AT_LEAST and hidden["merged"] >= TIMES * hidden["in order"]


def table(rows: Sequence[Mapping[str, Any]], real: Sequence[Mapping[str, Any]], commit: str) -> str:
    """Table of hidden shares for a page, between comments that name this script and the commit."""
    cells = [("", *ORDERS), ("---",) * (1 + len(ORDERS))]
    for share in WIRES:
        hidden = {row["order"]: f"{row['hidden']:.2f}" for row in rows if row["wire_share"] == share}
        cells.append((f"wire of {share} of compute", *hidden.values()))
    for dispatcher in dict.fromkeys(row["dispatcher"] for row in real):
        played = {row["order"]: row for row in real if row["dispatcher"] == dispatcher}
        share = played["merged"]["wire"] / played["merged"]["compute"]
        hidden = {order: f"{played[order]['hidden']:.2f}" if order in played else "" for order in ORDERS}
        cells.append((f"times of DeepSeek-V3, `{dispatcher}`: {share:.2f} of compute", *hidden.values()))
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([f"{BEGIN}, commit {commit} -->", "", *lines, "", END])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    sys.exit(0 if main(parser.parse_args().rounds) else 1)
