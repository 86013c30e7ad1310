"""Memory of the optimizer: it is built for the layers that run, and makes a step."""

from __future__ import annotations

from collections import Counter

import torch
from attrs import frozen
from torch import Tensor, nn

from moefw.compose.build import Shared
from moefw.compose.optimizer import build_optimizer
from moefw.core.contracts import Layout
from moefw.planner.micro_batch import MicroBatch


@frozen(kw_only=True)
class States:
    """Bytes of states on the device and in host memory, and temporary bytes of a step."""

    device: int
    host: int
    passing: int


def measure_states(batch: MicroBatch, layout: Layout, shared: Shared) -> States:
    """Return the states of all parameters. A layer that did not run has those of the layer that stands for it."""
    recorder = batch.recorder
    number, stored = _times(batch), nn.Module()
    copies: dict[nn.Parameter, int] = {}
    for name, parameter in batch.model.named_parameters():
        if number.get(parameter, 1):
            made = nn.Parameter(torch.empty(*batch.stored(parameter)))
            _put(stored, name, made)
            copies[made] = number.get(parameter, 1)
    before = recorder.now
    assembly = batch.assembly
    with recorder.places.phase("optimizer"):
        with assembly.registry.calling(assembly.parts.optimizer, "build()"):
            optimizer = build_optimizer(assembly, stored, layout, torch.device("cpu"), shared)
        for parameter in copies:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    found: Counter[bool] = Counter()
    for parameter, times in copies.items():
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                found[recorder.is_off_device(value)] += times * value.nbytes
    return States(device=found[False], host=found[True], passing=_most(batch, before))


def _times(batch: MicroBatch) -> dict[nn.Parameter, int]:
    """Return the number of parameters that each parameter of a layer stands for; 0: its layer does not run."""
    run = {layer.number: 1 + layer.more for layer in batch.layers}
    if not any(layer.more for layer in batch.layers):
        return {}
    layers = enumerate(batch.model.layers)
    return {parameter: run.get(number, 0) for number, layer in layers for parameter in layer.parameters()}


def _put(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, key = name.split(".")
    for each in path:
        if not hasattr(root, each):
            root.add_module(each, nn.Module())
        root = getattr(root, each)
    root.register_parameter(key, parameter)


def _most(batch: MicroBatch, since: int) -> int:
    """Return the maximum of the bytes that were allocated after a moment and are free now."""
    recorder = batch.recorder
    changes = [0] * (recorder.now + 1 - since)
    for life in recorder.lives:
        if life.began > since and life.ended <= recorder.now:
            changes[life.began - since] += life.nbytes
            changes[life.ended - since] -= life.nbytes
    total = most = 0
    for change in changes:
        total += change
        most = max(most, total)
    return most
