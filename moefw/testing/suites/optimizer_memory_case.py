"""Optimizer steps with given gradients, equal in every layout, so that stored tensors can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moefw.compose.optimizer import build_optimizer
from moefw.runtime.naming import by_parameter, joined
from moefw.runtime.parallel.pieces import all_of, is_shared_out, local, whole
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import open_model


@dataclass(kw_only=True)
class Rested:
    """Whole parameters, and states by key, by canonical name. ``shaped``: whether states have parameters' shards."""

    parameters: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    shaped: bool


def give_gradients(model: nn.Module, step: int) -> None:
    """Fill in gradients that depend on the step and the canonical name alone."""
    for parameter, pieces in by_parameter(model):
        parameter.grad = torch.empty_like(parameter)
        with all_of(parameter.grad) as values:
            for piece in pieces:
                part = piece.of(values)
                shape = piece.shard.whole(part.shape) if piece.shard else part.shape
                seed = int.from_bytes(piece.name.encode(), "big") % (1 << 60) + step
                drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                part.copy_(piece.shard.of(drawn) if piece.shard else drawn)


def rested(layer_case: LayerCase, steps: int) -> Rested:
    """Run steps with given gradients; return the parameters and states after them."""
    model, assembly, layout, shared = open_model(layer_case)
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    for step in range(steps):
        give_gradients(model, step)
        optimizer.step()
    found = Rested(parameters={}, states={}, shaped=True)
    for parameter, pieces in by_parameter(model):
        held: Mapping[str, Tensor] = optimizer.state[parameter]
        shaped = {key: value for key, value in held.items() if value.dim()}
        for value in shaped.values():
            same = value.shape == parameter.shape and local(value).shape == local(parameter).shape
            found.shaped = found.shaped and same and is_shared_out(value) == is_shared_out(parameter)
        every = {"": whole(parameter.detach()), **{key: whole(value) for key, value in shaped.items()}}
        for piece in pieces:
            for key, value in every.items():
                tensor = piece.of(value).clone()
                if piece.shard is not None:
                    tensor = joined(tensor, piece.shard, layout.group(piece.shard.axis))
                (found.states.setdefault(key, {}) if key else found.parameters)[piece.name] = tensor
    shared.close()
    return found
