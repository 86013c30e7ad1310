"""What the host takes for an operator in a layer, and for a step beside its passes: figures of a calibration.

Models with a few tokens of a few values are trained: nearly all of their time is that of the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
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
from moefw.planner.calibration.alone import LAYER, MICRO, STEP, Measurement
from moefw.planner.calibration.clocks import in_one_thread
from moefw.planner.calibration.readings import reading
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
def host_measurements(device: torch.device, repeats: int) -> Iterator[list[Measurement]]:
    """Yield the measurements of a host. The world is not joined yet: plans are made in worlds of their own."""
    with ExitStack() as stack:
        steps = [_Steps(gemm, device, stack) for gemm in GEMMS]
        operators = sum(each.operators for each in steps)

        def layer_s() -> float:
            return sum(each.seconds()[0] for each in steps) / operators

        def step_s() -> float:
            return sum(each.seconds()[1] for each in steps) / len(steps)

        yield [
            Measurement(name=name, unit="us of the host", read=partial(reading, taken_s, figure=_us, repeats=repeats))
            for name, taken_s in ((LAYER, layer_s), (STEP, step_s))
        ]


def _us(taken_s: float) -> float:
    return taken_s / MICRO


@final
class _Steps:
    """Steps of a model with a part for the products of experts. ``operators``: of a step, as plans count them."""

    def __init__(self, gemm: str, device: torch.device, stack: ExitStack) -> None:
        assembly = _assembly(gemm, device)
        self.operators = _operators(assembly)
        self._now = time.thread_time if in_one_thread(device) else time.perf_counter
        self._device = device
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
            self.seconds()

    def seconds(self) -> tuple[float, float]:
        """Seconds of the host for the passes of a step, and for the rest of it."""
        clock = StepClock(now=self._now, warmup=0)
        self._engine.step([self._batch], 1e-3, clock)
        of_section = clock.step_done()
        passes = sum(of_section.pop(section) for section in PASSES)
        return passes, sum(of_section.values())


def _assembly(gemm: str, device: torch.device) -> Assembly:
    tree = {**SPEC, "gemm": {"use": gemm}, "run": {"device": device.type}}
    machine = this_machine(device.type)
    return assemble_tree(tree, Marks("calibration"), defaults=defaults(), world=1, machine=machine)


def _operators(assembly: Assembly) -> int:
    """Operators of the passes of a step, products and transfers among them, as the time of a plan counts them."""
    return sum(
        each.layers * each.launches
        for position in ledger(assembly).positions
        for each in position.work
        if each.phase in PASSES
    )
