"""One step of a small model on the ranks of a pool: the order that each rank is told; the loss and all gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from moefw.core.plugin import Plugin
from moefw.core.records import Order
from moefw.runtime.naming import canonical_parameters
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.training.engine import Engine


@frozen
class Stepped:
    """Results of a rank's step: the loss, and the gradients of this rank's stages by canonical name."""

    loss: float
    grads: Mapping[str, Tensor]


def model_case(
    ranks: int, count: int, *, layers: int, parts: Mapping[str, Any], plugins: tuple[type[Plugin], ...]
) -> LayerCase:
    """Case with ``layers``, one more that predicts a further token, and ``count`` micro-batches a step."""
    sizes = {"num_layers": layers, "mtp_layers": 1}
    parts = {**parts, "parallel": {"pp": ranks}}
    case = whole_model(ranks, parts=parts, plugins=plugins, micro_batch=1, sizes=sizes)
    train = {**case.parts["train"], "tokens_per_step": count * case.parts["train"]["seq_len"]}
    return LayerCase(tokens=case.tokens, parts={**case.parts, "train": train}, plugins=plugins)


def order_here(layer_case: LayerCase, ranks: int, count: int) -> Order:
    """Order of ``count`` micro-batches on ``ranks``, as this rank has it."""
    order: Order = layer_case.resolve().parts.pipeline.order(ranks, count)
    return order


def stepped(layer_case: LayerCase) -> Stepped:
    """Run a step on this rank, without an update."""
    model, assembly, layout, shared = open_model(layer_case)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), layout, clip_norm=None)
    result = engine.step(global_batch(assembly, layout, 0), 0.0, lambda *_: nullcontext())
    grads = {piece.name: piece.of(_grad(piece.parameter)).clone() for piece in canonical_parameters(model)}
    shared.close()
    return Stepped(loss=result.loss, grads=grads)


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
