"""Forward and backward of one rank of a world of any size, without other ranks and without memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks, Tree
from moefw.core.site import Machine
from moefw.core.stages import Batch
from moefw.recording.fake_tensors import fake_world
from moefw.runtime.parallel.holders import holdings
from moefw.runtime.parallel.local_shards import local
from moefw.testing.announce import with_plugins

Kind = Literal["copied", "split", "experts"]
"""Dense parameters that tp replicates, dense parameters that tp splits, parameters of routed experts."""


@dataclass(frozen=True, kw_only=True)
class FakeStep:
    """State of one rank after a forward and a backward.

    ``elements``: number of elements of its parameters by kind, of its shards only under FSDP. ``without_gradient``:
    names of parameters without a gradient of their shard's shape.
    """

    elements: Mapping[Kind, int]
    without_gradient: tuple[str, ...]


def fake_step(tree: Tree, rank: int, world: int) -> FakeStep:
    """Build the model of one rank of a fake world, and run one micro-batch forward and backward.

    The router must know its counts beforehand (``forced``), and the dispatcher and the GEMM must accept them.
    """
    assembly = fake_assembly(tree, world)
    shared = Shared()
    with fake_world(rank, world):
        layout = open_layout(assembly, "cpu")
        model = build_model(assembly, layout, torch.device("cpu"), shared)
        batch = _batch(assembly)
        (model(batch).loss_sum * batch.loss_scale).backward()
        shared.close()
        return FakeStep(elements=_elements(model), without_gradient=tuple(_without_gradient(model)))


def fake_assembly(tree: Tree, world: int) -> Assembly:
    """Resolve a spec for ``world`` ranks that need not exist."""
    registry, machine = with_plugins(()), Machine(device="cpu")
    return assemble_tree(
        tree, Marks("fake world"), defaults=defaults(), registry=registry, world=world, machine=machine
    )


def _batch(assembly: Assembly) -> Batch:
    train = assembly.spec.train
    ids_BS = torch.zeros(train.micro_batch, train.seq_len, dtype=torch.int64)
    return Batch(ids_BS=ids_BS, labels_BS=ids_BS, loss_scale=torch.ones(()))


def _elements(model: nn.Module) -> dict[Kind, int]:
    held: dict[Kind, int] = {"copied": 0, "split": 0, "experts": 0}
    for holding in holdings(model):
        kind: Kind = "experts" if holding.side == "experts" else "split" if holding.split_axis else "copied"
        held[kind] += local(holding.parameter).numel()
    return held


def _without_gradient(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter.grad is None or _shape(parameter.grad) != _shape(parameter):
            yield name


def _shape(tensor: Tensor) -> torch.Size:
    return local(tensor).shape
