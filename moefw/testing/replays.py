"""Steps of a whole model on the counted device, eager and replayed: equal bits, or the reason why no graph holds them.

This registers the device for the rest of the process: run it on a pool of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from moefw.core.errors import RunError
from moefw.core.stages import Batch
from moefw.testing.host_waits import HostWaits
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import global_batch, open_model
from moefw.testing.tape import TapeGraphs
from moefw.training.graphed_run import WARM_UP, GraphedRun, OnFailure
from moefw.training.micro_batches import in_order
from moefw.training.step_sums import Tally

MICRO_BATCHES = 2


@dataclass(kw_only=True)
class CountedModel:
    """A whole model on the counted device, and what runs its steps; a context manager.

    ``is_graphed``: whether steps behind the first ones are replayed. ``told``: the lines that the run has told.
    """

    case: LayerCase
    is_graphed: bool
    on_failure: OnFailure = "stop"
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model, self.assembly, self.layout, self.shared = open_model(self.case)
        self.device = HostWaits()
        self._open = ExitStack()

    def __enter__(self) -> CountedModel:
        self._open.callback(self.shared.close)
        self._open.enter_context(self.device)
        self.device.move(self.model)
        self.graphs = TapeGraphs(self.device)
        self.run: Any = in_order(self.model)
        if self.is_graphed:
            parameters = self.model.parameters()
            tell = self.told.append
            self.run = GraphedRun(self.run, parameters, self.graphs, tell=tell, on_failure=self.on_failure)
        self._scale = self.device.on_device(torch.tensor(0.01))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def batches(self, step: int, count: int = MICRO_BATCHES) -> Sequence[Batch]:
        """This rank's micro-batches of a step, on the device."""
        own = global_batch(self.assembly, self.layout, step)[:count]
        return [replace(self.device.on_device(batch), loss_scale=self._scale) for batch in own]

    def step(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Sums and gradients of a step, on the host."""
        for parameter in self.model.parameters():
            parameter.grad = None
        tally: Tally = self.run(batches, untimed)
        values = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        values["loss"] = tally.loss
        for number, layer in tally.layers.items():
            values |= {f"{name} of layer {number}": value for name, value in layer.stats.items()}
        return {name: self.device.on_host(value) for name, value in values.items() if value is not None}


@frozen
class Comparison:
    """Eager and replayed steps of a model on a rank.

    ``failure``: why a step could not be captured, or replayed; empty if it could. ``differing``: what differs, by step.
    ``operators``: those of the graph.
    """

    failure: str = ""
    differing: Sequence[str] = ()
    operators: Sequence[str] = ()


def compared(case: LayerCase, replays: int) -> Comparison:
    """Comparison of so many steps, replayed behind the first, eager ones, with the same steps of an eager run."""
    with CountedModel(case=case, is_graphed=False) as counted:
        eager = [counted.step(counted.batches(WARM_UP + step)) for step in range(replays)]
    try:
        with CountedModel(case=case, is_graphed=True) as counted:
            replayed = [counted.step(counted.batches(step)) for step in range(WARM_UP + replays)][WARM_UP:]
            (tape,) = counted.graphs.tapes
    except RunError as error:
        return Comparison(failure=str(error))
    differing = []
    for step, (wanted, found) in enumerate(zip(eager, replayed, strict=True)):
        assert wanted.keys() == found.keys(), "a replay leaves the gradients that an eager step does"
        differing += [f"step {step}: {name}" for name in wanted if not torch.equal(wanted[name], found[name])]
    return Comparison(differing=differing, operators=tape.operators)


def untimed(section: str, *passes: object) -> nullcontext[None]:
    """Clock of steps that nobody times."""
    return nullcontext()
