"""Small steps that a calibration predicts with what it has measured, and measures: the errors of its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from attrs import evolve, frozen

from moefw.compose.assembly import Assembly
from moefw.planner import ledger
from moefw.planner.calibration.alone import Measurement
from moefw.planner.calibration.clocks import in_one_thread
from moefw.planner.calibration.ranks import Readings
from moefw.planner.calibration.readings import Reading, reading_of
from moefw.planner.calibration.result import figure_of
from moefw.planner.cluster import THIS_MACHINE, Checked, Cluster
from moefw.planner.report import Ledger
from moefw.planner.time.forecast import forecast, lacks
from moefw.planner.time.software import Software
from moefw.training.small_steps import Steps, small_assembly

MILLI: Final = 1e-3
TREE: Final[Mapping[str, Any]] = {
    "model": {"vocab_size": 512, "dim": 128, "num_layers": 3, "num_experts": 8, "top_k": 2, "expert_dim": 192},
    "attention": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32},
    "routing": {"use": "forced"},
    "train": {"micro_batch": 2, "seq_len": 128},
}
ALONE: Final[Mapping[str, Mapping[str, Any]]] = {
    "alone": {},
    "alone, loop": {"gemm": {"use": "loop"}},
    "alone, bf16": {"precision": {"use": "bf16"}},
}
"""Specs that each rank trains by itself, as what they add to ``TREE``, by layout in words."""


def together(world: int) -> Mapping[str, Mapping[str, Any]]:
    """Specs that all ranks train together."""
    experts = max(2 * world, TREE["model"]["num_experts"])
    spread = {"model": {**TREE["model"], "num_experts": experts - experts % world}}
    return {
        "dp": {"parallel": {"dense": {"dp": world}}},
        "dp, sharded": {"parallel": {"dense": {"dp": world, "shard": "all"}, "experts": {"shard": "all"}}},
        "ep": {**spread, "parallel": {"experts": {"ep": world}}},
        "ep, loop": {**spread, "parallel": {"experts": {"ep": world}}, "gemm": {"use": "loop"}},
    }


@frozen(kw_only=True)
class Check:
    """A step to predict and to measure. ``layout``: in words."""

    layout: str
    assembly: Assembly
    plan: Ledger
    measurement: Measurement


@contextmanager
def checks(device: torch.device, world: int, repeats: int) -> Iterator[list[Check]]:
    """Yield the checks of a machine. The world is not joined yet: plans are made in worlds of their own.

    Their measurements are collective.
    """
    layouts = [(layout, added, 1) for layout, added in ALONE.items()]
    if world > 1:
        layouts += [(layout, added, world) for layout, added in together(world).items()]
    with ExitStack() as stack:
        yield [_check(layout, added, ranks, device, repeats, stack) for layout, added, ranks in layouts]


def _check(
    layout: str, added: Mapping[str, Any], world: int, device: torch.device, repeats: int, stack: ExitStack
) -> Check:
    assembly = small_assembly({**TREE, **added}, device, world)
    steps = Steps(assembly, device, stack) if world == 1 else None
    # A rank that is alone waits for nobody: other work on the machine adds nothing to what it had of a processor.
    now = time.thread_time if world == 1 and in_one_thread(device) else time.perf_counter

    def read() -> Reading:
        taking = steps or Steps(assembly, device, stack)
        return _reading(taking, now, repeats)

    name = f"a step: {layout}"
    return Check(
        layout=layout,
        assembly=assembly,
        plan=ledger(assembly),
        measurement=Measurement(name=name, unit="ms", read=read),
    )


def _reading(steps: Steps, now: Callable[[], float], repeats: int) -> Reading:
    """Reading of steps: all ranks as many."""
    times = [sum(steps.seconds(now)) for _ in range(repeats)]
    return reading_of(times, figure=lambda taken_s: taken_s / MILLI)


def with_checked(cluster: Cluster, found: Sequence[Check], readings: Readings, by: str) -> Cluster:
    """The cluster with each step that was measured, where it has what the prediction needs. ``by``: who measured."""
    told = partial(_checked, cluster, readings, by)
    return evolve(cluster, checked=tuple(checked for checked in map(told, found) if checked is not None))


def _checked(cluster: Cluster, readings: Readings, by: str, check: Check) -> Checked | None:
    reading = readings.of.get(check.measurement.name)
    if reading is None or lacks(cluster, check.plan):
        return None
    predicted = forecast(check.assembly, check.plan, cluster, THIS_MACHINE, Software())
    return Checked(
        layout=check.layout,
        inputs=predicted.inputs,
        predicted_ms=float(f"{predicted.step.step_s / MILLI:.4g}"),
        measured_ms=figure_of(reading, by),
    )
