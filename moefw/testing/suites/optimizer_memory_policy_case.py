"""Optimizer steps with given gradients, equal in every layout, so that stored tensors can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moefw.compose.build import Shared
from moefw.compose.optimizer import OptimizerUnderPolicies, blocks_of, build_optimizer
from moefw.core.contracts import Layout
from moefw.core.records import Canonical
from moefw.runtime.naming import by_parameter, joined
from moefw.runtime.parallel.boxes import of_blocks
from moefw.runtime.parallel.local_shards import all_of, is_shared_out, local, whole
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import open_model


@dataclass(kw_only=True)
class Rested:
    """Whole parameters, and states by key, by canonical name.

    ``states``: as they are stored. ``values``: as the optimizer gets them. ``shaped``: whether states are sharded as
    their parameters are, with their shape but for blocks of columns that share a value.
    """

    parameters: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    values: dict[str, dict[str, Tensor]]
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


def rested(layer_case: LayerCase, steps: int, resumed_at: int | None = None) -> Rested:
    """Run steps with given gradients; return the parameters and states after them.

    ``resumed_at``: the step before which the run ends, and another one goes on with the states of its checkpoint.
    """
    model, assembly, layout, shared = open_model(layer_case)
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    for step in range(steps):
        if step == resumed_at:
            shared.close()
            shared = Shared()
            ended, optimizer = optimizer, build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
            _fill(optimizer, ended)
        give_gradients(model, step)
        optimizer.step()
    blocks = blocks_of(optimizer)
    parameters: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Tensor]] = {}
    shaped = True
    for parameter, pieces in by_parameter(model):
        all_states: Mapping[str, Tensor] = optimizer.state[parameter]
        own_states = {key: value for key, value in all_states.items() if value.dim()}  # not a count of steps
        for key, value in own_states.items():
            block = blocks.get(key, 1)
            same_shape = value.shape == of_blocks(parameter.shape, block)
            same_local_shape = local(value).shape == of_blocks(local(parameter).shape, block)
            if not same_shape or not same_local_shape or is_shared_out(value) != is_shared_out(parameter):
                shaped = False
        own_values = optimizer.values(parameter) if isinstance(optimizer, OptimizerUnderPolicies) else own_states
        # Collective: every rank joins the pieces in one order.
        whole_parameter = whole(parameter.detach())
        whole_states = {key: whole(value) for key, value in own_states.items()}
        whole_values = {key: whole(value) for key, value in own_values.items()}
        for piece in pieces:
            parameters[piece.name] = _joined(piece, whole_parameter, layout)
            for key, value in whole_states.items():
                states.setdefault(key, {})[piece.name] = _joined(piece, value, layout)
            for key, value in whole_values.items():
                values.setdefault(key, {})[piece.name] = _joined(piece, value, layout)
    shared.close()
    return Rested(parameters=parameters, states=states, values=values, shaped=shaped)


@torch.no_grad()
def _fill(optimizer: torch.optim.Optimizer, ended: torch.optim.Optimizer) -> None:
    """Give an optimizer the states of another one, as a checkpoint fills them in."""
    for parameter, states in ended.state.items():
        own = optimizer.state[parameter]
        for key, value in states.items():
            own.setdefault(key, torch.zeros_like(value)).copy_(value)


def _joined(piece: Canonical, value: Tensor, layout: Layout) -> Tensor:
    """Piece of a parameter or of a state, whole. Collective if ranks have parts of it."""
    tensor = piece.of(value).clone()
    if piece.shard is None:
        return tensor
    return joined(tensor, piece.shard, layout.group(piece.shard.axis))
