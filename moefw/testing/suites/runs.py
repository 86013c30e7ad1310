"""Whole models with a test's own plugins, on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import LayerContext, ModelParts, Shared, build_model, open_layout
from moefw.compose.optimizer import build_optimizer
from moefw.core.contracts import Layout
from moefw.core.plugin import Plugin
from moefw.core.stages import Batch
from moefw.runtime.naming import canonical_parameters, initialise, state_tensors
from moefw.testing.layer_case import LayerCase
from moefw.testing.training import SMALL
from moefw.training.engine import Engine, StepResult


def row_alignment(assembly: Assembly) -> int:
    """Alignment of rows that the parts of an assembly agreed on."""
    return int(assembly.layers[0].facts.get("row_alignment") or 1)


def open_context(layer_case: LayerCase) -> tuple[LayerContext, Assembly]:
    """Build context of the layer case's layer on this rank, and the assembly."""
    assembly = layer_case.resolve()
    layout = open_layout(assembly, "cpu")
    return ModelParts(assembly, layout, torch.device("cpu"), Shared()).at(0), assembly


def whole_model(
    world: int,
    *,
    parts: Mapping[str, Any],
    plugins: tuple[type[Plugin], ...],
    micro_batch: int = 2,
    sizes: Mapping[str, Any] | None = None,
) -> LayerCase:
    """Case with a small transformer that trains in milliseconds; ``sizes`` overrides the model's sizes."""
    train = {**SMALL["train"], "micro_batch": micro_batch}
    spec = {**SMALL, "model": {**SMALL["model"], **(sizes or {})}, "train": train, **parts}
    return LayerCase(tokens=(1,) * world, parts=spec, plugins=plugins)


def open_model(layer_case: LayerCase) -> tuple[nn.Module, Assembly, Layout, Shared]:
    """Whole model of a layer case on this rank, initialised by name."""
    assembly = layer_case.resolve()
    layout = open_layout(assembly, "cpu")
    shared = Shared()
    model = build_model(assembly, layout, torch.device("cpu"), shared)
    std: Any = model.init_std
    initialise(model, seed=assembly.spec.run.seed, std=std)
    return model, assembly, layout, shared


def global_batch(assembly: Assembly, layout: Layout, step: int) -> list[Batch]:
    """This rank's micro-batches of random tokens that depend on the step alone."""
    train = assembly.spec.train
    vocabulary = getattr(assembly.parts.model, "vocab_size", 2)
    shape = (train.tokens_per_step // train.seq_len, train.seq_len + 1)
    tokens_BS = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(step))
    seeds_B = step * len(tokens_BS) + torch.arange(len(tokens_BS))
    own_tokens, own_seeds = (
        of_all.tensor_split(layout.size("dp"))[layout.index("dp")] for of_all in (tokens_BS, seeds_B)
    )
    pieces = zip(own_tokens.split(train.micro_batch), own_seeds.split(train.micro_batch), strict=True)
    return [Batch(ids_BS=tokens[:, :-1], labels_BS=tokens[:, 1:], seeds_B=seeds) for tokens, seeds in pieces]


@dataclass(kw_only=True)
class Trained:
    """Results of a short run, and this rank's parameters and state at its end."""

    results: list[StepResult]
    last: dict[str, Tensor]
    state: dict[str, Tensor]


def train(layer_case: LayerCase, steps: int) -> Trained:
    """Train the whole model of a layer case for some steps on this rank."""
    model, assembly, layout, shared = open_model(layer_case)
    settings = assembly.spec.train
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    engine = Engine.of(model, optimizer, layout, settings)
    results = [engine.step(global_batch(assembly, layout, step), settings.lr, _no_clock) for step in range(steps)]
    last = {piece.name: piece.of(piece.parameter.detach()).clone() for piece in canonical_parameters(model)}
    state = {name: tensor.clone() for name, tensor in state_tensors(model).items()}
    shared.close()
    return Trained(results=results, last=last, state=state)


@contextmanager
def _no_clock(section: str, *passes: object) -> Iterator[None]:
    yield
