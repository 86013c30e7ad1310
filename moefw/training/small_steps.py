"""Steps of small models that a calibration trains: a micro-batch a rank, of made-up tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
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
from moefw.runtime.naming import initialise
from moefw.training.clock import StepClock
from moefw.training.engine import Engine

WARM_UP: Final = 4
"""Steps until Python has specialised its code, and the allocator has its pages."""
VOCABULARY: Final = 256
"""Tokens that batches have; each model knows more, or as many."""
PASSES: Final = ("forward", "backward")


def small_assembly(tree: Mapping[str, Any], device: torch.device, world: int) -> Assembly:
    """Assembly of a spec in which each rank of a world has a micro-batch of its own."""
    train = tree["train"]
    tokens = world * train["micro_batch"] * train["seq_len"]
    whole = {**tree, "train": {**train, "tokens_per_step": tokens}, "run": {"device": device.type}}
    machine = this_machine(device.type)
    return assemble_tree(whole, Marks("calibration"), defaults=defaults(), world=world, machine=machine)


@final
class Steps:
    """Steps of a model. Building them is collective if several ranks train it, and so is each step."""

    def __init__(self, assembly: Assembly, device: torch.device, stack: ExitStack) -> None:
        shared = Shared()
        stack.callback(shared.close)
        layout = open_layout(assembly, str(device))
        model = build_model(assembly, layout, device, shared)
        std: Any = model.init_std
        initialise(model, seed=0, std=std)
        optimizer = build_optimizer(assembly, model, layout, device, shared)
        train = assembly.spec.train
        self._engine = Engine.of(model, optimizer, layout, train)
        ids_N = torch.arange(train.micro_batch * train.seq_len, device=device) % VOCABULARY
        ids_BS = ids_N.view(train.micro_batch, train.seq_len)
        seeds_B = torch.zeros(train.micro_batch, dtype=torch.int64)
        self._batch = Batch(ids_BS=ids_BS, labels_BS=ids_BS.clone(), seeds_B=seeds_B)
        for _ in range(WARM_UP):
            self.seconds(time.perf_counter)

    def seconds(self, now: Callable[[], float]) -> tuple[float, float]:
        """Seconds for the passes of a step, and for the rest of it."""
        clock = StepClock(now=now, warmup=0)
        self._engine.step([self._batch], 1e-3, clock)
        of_section = clock.step_done()
        passes = sum(of_section.pop(section) for section in PASSES)
        return passes, sum(of_section.values())
