"""What the host takes for an operator in a layer, and for a step beside its passes: figures of a calibration.

Models with a few tokens of a few values are trained: nearly all of their time is that of the host. Ranks train them
alone and, where there are several, together: the passes of the last micro-batch of a step, and here it is the only one,
run phase by phase if gradients are summed over ranks, which takes the host more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, final

import torch

from moefw.compose.assembly import Assembly
from moefw.planner import ledger
from moefw.planner.calibration.alone import LAYER, LAYER_OF_RANKS, MICRO, STEP, STEP_OF_RANKS, Measurement
from moefw.planner.calibration.clocks import in_one_thread
from moefw.planner.calibration.readings import Reading, reading, reading_of
from moefw.training.small_steps import PASSES, Steps, small_assembly

SPEC: Final[Mapping[str, Any]] = {
    "model": {"vocab_size": 256, "dim": 16, "num_layers": 4, "num_experts": 8, "top_k": 2, "expert_dim": 16},
    "attention": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    "train": {"micro_batch": 1, "seq_len": 16},
}
GEMMS: Final = ("grouped", "loop")
"""Experts in one operator, and each in operators of its own: the first has more Python to an operator."""


@contextmanager
def host_measurements(device: torch.device, world: int, repeats: int) -> Iterator[list[Measurement]]:
    """Yield the measurements of a host. The world is not joined yet: plans are made in worlds of their own.

    Those of all ranks together, if ``world`` has several, are collective.
    """
    now = time.thread_time if in_one_thread(device) else time.perf_counter
    with ExitStack() as stack:
        alone = _Models(device, 1, stack)
        alone.build()
        found = [
            _measurement(LAYER, partial(reading, partial(alone.layer_s, now), figure=_us, repeats=repeats)),
            _measurement(STEP, partial(reading, partial(alone.step_s, now), figure=_us, repeats=repeats)),
        ]
        if world > 1:
            together = _Models(device, world, stack)
            # In what ends a step ranks wait for each other: by the clock on the wall.
            layer_s, step_s = partial(together.layer_s, now), partial(together.step_s, time.perf_counter)
            found += [
                _measurement(LAYER_OF_RANKS, partial(_together, together, layer_s, repeats)),
                _measurement(STEP_OF_RANKS, partial(_together, together, step_s, repeats)),
            ]
        yield found


def _measurement(name: str, read: Callable[[], Reading]) -> Measurement:
    return Measurement(name=name, unit="us of the host", read=read)


def _together(models: _Models, taken_s: Callable[[], float], repeats: int) -> Reading:
    """Reading of what ranks do together: all of them as often."""
    models.build()
    return reading_of([taken_s() for _ in range(repeats + 1)][1:], figure=_us)


def _us(taken_s: float) -> float:
    return taken_s / MICRO


@final
class _Models:
    """The small models, trained by a rank alone or by all ranks of a world."""

    def __init__(self, device: torch.device, world: int, stack: ExitStack) -> None:
        self._device = device
        self._stack = stack
        self._assemblies = [_assembly(gemm, device, world) for gemm in GEMMS]
        self._operators = sum(map(_operators, self._assemblies))
        self._steps: list[Steps] = []

    def build(self) -> None:
        """Build the models, once. Collective if several ranks train them."""
        if not self._steps:
            self._steps = [Steps(assembly, self._device, self._stack) for assembly in self._assemblies]

    def layer_s(self, now: Callable[[], float]) -> float:
        """Seconds of an operator in the passes of a step of each."""
        return sum(each.seconds(now)[0] for each in self._steps) / self._operators

    def step_s(self, now: Callable[[], float]) -> float:
        """Mean seconds of a step without its passes."""
        return sum(each.seconds(now)[1] for each in self._steps) / len(self._steps)


def _assembly(gemm: str, device: torch.device, world: int) -> Assembly:
    return small_assembly({**SPEC, "gemm": {"use": gemm}, "parallel": {"dense": {"dp": world}}}, device, world)


def _operators(assembly: Assembly) -> int:
    """Operators of the passes of a step, products and transfers among them, as the time of a plan counts them."""
    return sum(
        each.layers * each.launches
        for position in ledger(assembly).positions
        for each in position.work
        if each.phase in PASSES
    )
