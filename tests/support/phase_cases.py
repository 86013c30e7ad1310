"""Whole models whose phases a scheduler runs one by one, several micro-batches at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moefw.core.stages import Batch, Output
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.forward_context import forward_with
from moefw.runtime.parallel.local_shards import local
from moefw.runtime.parallel.sharding import gathered, reduce_pass
from moefw.runtime.phases import PhaseCall
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import global_batch, open_model
from moefw.training.engine import Engine, StepResult
from moefw.training.step_sums import Tally

Found = dict[str, Tensor]


class MicroBatch:
    """One micro-batch on its way forward and backward through the phases of a model."""

    def __init__(self, model: Any, batch: Batch) -> None:
        self.model = model
        self.phases, self.value, self.calls = model.phases, batch, list[PhaseCall]()
        self.scale, self.grads = batch.loss_scale, ()

    def forward(self) -> None:
        """Run the next phase."""
        call = PhaseCall()
        self.value = call.run(self.phases[len(self.calls)], self.value)
        self.calls.append(call)
        if len(self.calls) == len(self.phases):
            output: Output = self.value
            self.output = detached(output)
            self.value, self.grads = None, (self.scale,) * (1 + len(output.losses))

    def backward(self) -> None:
        """Run the backward of the last phase that is left."""
        self.grads = self.calls.pop().backward(self.grads)
        if not self.calls:
            reduce_pass(self.model)


def in_one(model: Any, batches: Sequence[Batch]) -> list[Output]:
    """Plain forward and backward, micro-batch after micro-batch."""
    found = []
    for batch in batches:
        output = model(batch)
        (output.objective * batch.loss_scale).backward()
        found.append(detached(output))
    return found


def detached(output: Output) -> Output:
    """Return the output without its graph."""
    losses = {name: loss.detach() for name, loss in output.losses.items()}
    return replace(output, loss_sum=output.loss_sum.detach(), losses=losses)


def phase_by_phase(model: Any, batches: Sequence[Batch]) -> list[Output]:
    """Every micro-batch through all phases, and back."""
    flows = []
    with gathered(model):
        for batch in batches:
            flows.append(MicroBatch(model, batch))
            for step in (MicroBatch.forward, MicroBatch.backward):
                for _ in model.phases:
                    step(flows[-1])
    return [flow.output for flow in flows]


def interleaved(model: Any, batches: Sequence[Batch]) -> list[Output]:
    """The backward of a micro-batch alternates with the forward of the next, phase by phase."""
    flows = [MicroBatch(model, batch) for batch in batches]
    with gathered(model):
        for before, after in zip([None, *flows], [*flows, None], strict=True):
            for _ in model.phases:
                if after is not None:
                    after.forward()
                if before is not None:
                    before.backward()
    return [flow.output for flow in flows]


def all_forward_first(model: Any, batches: Sequence[Batch]) -> list[Output]:
    """All forwards come before the first backward."""
    flows = [MicroBatch(model, batch) for batch in batches]
    with gathered(model):
        for step in (MicroBatch.forward, MicroBatch.backward):
            for flow in flows:
                for _ in model.phases:
                    step(flow)
    return [flow.output for flow in flows]


def wgrads_at_the_end(model: Any, batches: Sequence[Batch]) -> list[Output]:
    """All weight gradients come after the gradients of the inputs of all micro-batches."""
    later = Wgrads()
    with forward_with(wgrads=later):
        found = interleaved(model, batches)
    later.run()
    return found


def wgrads_after_each(model: Any, batches: Sequence[Batch]) -> list[Output]:
    """The weight gradients of a micro-batch come after its backward, and FSDP reduces them then."""
    found, later = [], Wgrads()
    with gathered(model):
        for batch in batches:
            flow = MicroBatch(model, batch)
            with forward_with(wgrads=later):
                for step in (MicroBatch.forward, MicroBatch.backward):
                    for _ in model.phases:
                        step(flow)
            later.run()
            reduce_pass(model)
            found.append(flow.output)
    return found


def scheduled(case: LayerCase, schedules: Sequence[Callable[[Any, Sequence[Batch]], list[Output]]]) -> list[Found]:
    """Return losses and gradients of each schedule by name, of this rank's shards alone."""
    model, assembly, layout, shared = open_model(case)
    scale = torch.tensor(1.0 / assembly.spec.train.tokens_per_step)
    batches = [replace(batch, loss_scale=scale) for batch in global_batch(assembly, layout, 0)[:2]]
    with torch.no_grad():
        model(batches[0])  # FSDP takes the first module that is called for the root
    found = []
    for schedule in schedules:
        model.zero_grad(set_to_none=True)
        values = {f"the loss of micro-batch {at}": one.objective for at, one in enumerate(schedule(model, batches))}
        values |= {
            name: local(parameter.grad).clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        found.append(values)
    shared.close()
    return found


def trained(case: LayerCase, schedule: Callable[[Any, Sequence[Batch]], list[Output]] | None) -> list[StepResult]:
    """Train two steps, with the engine's own loop or with a schedule in its place."""
    model, assembly, layout, shared = open_model(case)
    optimizer = torch.optim.AdamW(model.parameters())

    def run(batches: Sequence[Batch], clock: Any) -> Tally:
        tally = Tally(torch.device("cpu"))
        with shared_by_micro_batches(model.parameters()):
            outputs = schedule(model, batches)
        for number, output in enumerate(outputs):
            tally.add(output, number)
        return tally

    engine = Engine(model, optimizer, layout, clip_norm=1.0, run=run if schedule else None)
    steps = [global_batch(assembly, layout, step)[:2] for step in range(2)]
    results = [engine.step(batches, 1e-3, lambda *_: nullcontext()) for batches in steps]
    shared.close()
    return results
