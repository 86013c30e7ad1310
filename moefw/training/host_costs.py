"""What the host takes for an operator in a layer, and for a step beside its passes: figures of a calibration.

Models with a few tokens of a few values are trained: nearly all of their time is that of the host. Ranks train them
alone and, where there are several, together: passes of a model whose gradients are summed over ranks run phase by
phase, which takes the host more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, final

import torch

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.machine import this_machine
from moefw.compose.optimizer import build_optimizer
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.stages import Batch
from moefw.planner import ledger
from moefw.planner.calibration.alone import LAYER, LAYER_OF_RANKS, MICRO, STEP, STEP_OF_RANKS, Measurement
from moefw.planner.calibration.clocks import in_one_thread
from moefw.planner.calibration.readings import Reading, reading, reading_of
from moefw.runtime.naming import initialise
from moefw.training.clock import StepClock
from moefw.training.engine import Engine

TOKENS: Final = 16
WARM_UP: Final = 4
"""Steps until Python has specialised its code, and the allocator has its pages."""
PASSES: Final = ("forward", "backward")
SPEC: Final[Mapping[str, Any]] = {
    "model": {"vocab_size": 256, "dim": 16, "num_layers": 4, "num_experts": 8, "top_k": 2, "expert_dim": 16},
    "attention": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    "train": {"micro_batch": 1, "seq_len": TOKENS, "tokens_per_step": TOKENS},
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
        self._steps: list[_Steps] = []

    def build(self) -> None:
        """Build the models, once. Collective if several ranks train them."""
        if not self._steps:
            self._steps = [_Steps(assembly, self._device, self._stack) for assembly in self._assemblies]

    def layer_s(self, now: Callable[[], float]) -> float:
        """Seconds of an operator in the passes of a step of each."""
        return sum(each.seconds(now)[0] for each in self._steps) / self._operators

    def step_s(self, now: Callable[[], float]) -> float:
        """Mean seconds of a step without its passes."""
        return sum(each.seconds(now)[1] for each in self._steps) / len(self._steps)


@final
class _Steps:
    """Steps of a model."""

    def __init__(self, assembly: Assembly, device: torch.device, stack: ExitStack) -> None:
        shared = Shared()
        stack.callback(shared.close)
        layout = open_layout(assembly, str(device))
        model = build_model(assembly, layout, device, shared)
        std: Any = model.init_std
        initialise(model, seed=0, std=std)
        optimizer = build_optimizer(assembly, model, layout, device, shared)
        self._engine = Engine.of(model, optimizer, layout, assembly.spec.train)
        ids_BS = torch.arange(TOKENS, device=device).view(1, -1)
        self._batch = Batch(ids_BS=ids_BS, labels_BS=ids_BS.clone(), seeds_B=torch.zeros(1, dtype=torch.int64))
        for _ in range(WARM_UP):
            self.seconds(time.perf_counter)

    def seconds(self, now: Callable[[], float]) -> tuple[float, float]:
        """Seconds for the passes of a step, and for the rest of it."""
        clock = StepClock(now=now, warmup=0)
        self._engine.step([self._batch], 1e-3, clock)
        of_section = clock.step_done()
        passes = sum(of_section.pop(section) for section in PASSES)
        return passes, sum(of_section.values())


def _assembly(gemm: str, device: torch.device, world: int) -> Assembly:
    """Assembly in which each rank of a world has a micro-batch of its own."""
    tree = {
        **SPEC,
        "gemm": {"use": gemm},
        "parallel": {"dense": {"dp": world}},
        "train": {**SPEC["train"], "tokens_per_step": world * TOKENS},
        "run": {"device": device.type},
    }
    machine = this_machine(device.type)
    return assemble_tree(tree, Marks("calibration"), defaults=defaults(), world=world, machine=machine)


def _operators(assembly: Assembly) -> int:
    """Operators of the passes of a step, products and transfers among them, as the time of a plan counts them."""
    return sum(
        each.layers * each.launches
        for position in ledger(assembly).positions
        for each in position.work
        if each.phase in PASSES
    )
