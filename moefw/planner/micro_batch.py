"""Forward and backward of one micro-batch of one rank, on tensors without memory, recorded.

Of layers that are alike, three run (:mod:`moefw.planner.layers`), and FSDP does not run
(:mod:`moefw.planner.gathering`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model
from moefw.compose.spec.sections import TrainSpec
from moefw.core.contracts import Layout
from moefw.core.stages import Batch
from moefw.planner.gathering import Gathering, Unit
from moefw.planner.layers import InPhases, RunLayer, run_layers
from moefw.planner.operations import Operations
from moefw.planner.report import Work
from moefw.recording.places import Place
from moefw.recording.recorder import GATHERED, PARAMETERS, Life, Recorder

BUFFERS: Final = "buffers"
BATCH: Final = "batch"
GRADIENTS: Final = "gradients"
POOL: Final = "pool"
"""Storages that a policy keeps from step to step."""
SAVED: Final = (None, GATHERED)
"""Labels of the storages that forward allocates and backward frees."""


@final
class MicroBatch:
    """A model and its recorded micro-batch. Moments count changes of the memory in use.

    ``gradients``: whether those of an earlier micro-batch are there. ``layers``: those that run. ``offloaded``: bytes
    of host memory by place.
    """

    def __init__(
        self, assembly: Assembly, layout: Layout, shared: Shared, recorder: Recorder, *, gradients: bool
    ) -> None:
        self.assembly, self.recorder = assembly, recorder
        self.operations = Operations(recorder, layout)
        self.sharding: Gathering | None = None
        self.model: Any = build_model(
            assembly, layout, torch.device("cpu"), shared, shard_by=self._shard_by, watch=recorder.places
        )
        every = [RunLayer(number) for number in range(assembly.site.num_layers)]
        self.layers = run_layers(assembly, self.model) if isinstance(self.model, InPhases) else every
        self._began: list[int] = []
        self._done: list[int] = []
        self.operations.learn_weights(self.model)
        recorder.label(self.model.parameters(), PARAMETERS)
        recorder.label(self.model.buffers(), BUFFERS)
        if gradients:
            self._give_gradients()
        self.offloaded: Counter[Place] = Counter()
        self.begin = self.turn = self.end = recorder.now
        """The moments before forward, between forward and backward, and after backward."""
        self._loss: Tensor | None = None

    def _shard_by(self, layout: Layout) -> Any:
        self.sharding = Gathering(layout, self.recorder, self.operations)
        return self.sharding

    @property
    def units(self) -> Sequence[Unit]:
        """The units of parameters that ranks share."""
        return self.sharding.units if self.sharding else ()

    def stored(self, parameter: nn.Parameter) -> Sequence[int]:
        """Return the shape of what this rank stores of a parameter, in fp32."""
        return self.sharding.shards.get(parameter, parameter.shape) if self.sharding else parameter.shape

    def forward(self) -> None:
        """Run forward."""
        recorder, batch = self.recorder, self._batch()
        recorder.off_device.clear()
        with recorder.places.phase("forward"), self.operations:
            self._loss = self._forward(batch)
        self.turn = recorder.now
        self.offloaded.update(recorder.off_device)

    def backward(self) -> None:
        """Run backward."""
        recorder, loss = self.recorder, self._loss
        assert loss is not None, "forward comes before backward"
        self._loss = None
        with recorder.places.phase("backward"), self.operations:
            loss.backward()
            del loss
            for unit in self.units:
                unit.end()
        self.end = recorder.now
        shards = [unit.grads for unit in self.units if unit.grads is not None]
        recorder.label([*shards, *(p.grad for p in self.model.parameters() if p.grad is not None)], GRADIENTS)
        for life in recorder.alive(self.end):
            if life.began > self.begin and life.kind is None:
                life.kind = POOL

    def work(self) -> Iterator[Work]:
        """Yield the operators that ran, by layer, region and pass."""
        return self.operations.work({layer.number: 1 + layer.more for layer in self.layers})

    def _forward(self, batch: Batch) -> Tensor:
        model, root = self.model, self.sharding.root_unit if self.sharding else None
        if root is not None:
            root.before(None, ())
        if not any(layer.more for layer in self.layers):
            output = model(batch)
        else:
            value = model.begin(batch)
            for layer in self.layers:
                self._mark(value)
                for phase in model.layers[layer.number].phases:
                    value = phase(value)
            self._mark(value)
            output = model.end(value)
        if root is not None:
            root.after(None, (), output)
        loss: Tensor = output.objective * batch.loss_scale
        return loss

    def _mark(self, value: Any) -> None:
        """Record the current moment, and the moment at which backward reaches ``value``."""
        at = len(self._began)
        self._began.append(self.recorder.now)
        self._done.append(0)

        def done(grad: Tensor) -> None:
            self._done[at] = self.recorder.now

        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(done)

    def spans(self) -> Iterator[tuple[RunLayer, range, range]]:
        """Yield the layers that stand for others, with the moments of their forward and of their backward."""
        for at, layer in enumerate(self.layers):
            if layer.more:
                forward = range(self._began[at], self._began[at + 1])
                yield layer, forward, range(self._done[at + 1], self._done[at])

    def saved(self) -> Iterator[Life]:
        """Yield the storages that forward leaves for backward, without batch, gradients and pools."""
        return (life for life in self.recorder.alive(self.turn) if life.began > self.begin and life.kind in SAVED)

    def _batch(self) -> Batch:
        train = self.assembly.spec.train
        ids_BS = torch.zeros(train.micro_batch, train.seq_len, dtype=torch.int64)
        labels_BS, seeds_B = ids_BS.clone(), torch.arange(train.micro_batch)
        batch = Batch(ids_BS=ids_BS, labels_BS=labels_BS, seeds_B=seeds_B, loss_scale=torch.ones(()))
        batch = as_trained(batch, train)
        given = (ids_BS, labels_BS, seeds_B, batch.positions_BS, batch.documents_BS, batch.mask_BS)
        self.recorder.label([tensor for tensor in given if tensor is not None], BATCH)
        return batch

    def _give_gradients(self) -> None:
        in_units = {parameter for unit in self.units for parameter in unit.parameters}
        for parameter in self.model.parameters():
            if parameter not in in_units:
                parameter.grad = torch.zeros_like(parameter)
        for unit in self.units:
            unit.grads = torch.empty(unit.elements // unit.shards)


def as_trained(batch: Batch, train: TrainSpec) -> Batch:
    """Return a batch with masks as ``train`` makes them, of one document a sequence, or as a full pack of them."""
    if not train.masks_documents:
        return batch
    rows, length = batch.ids_BS.shape
    if train.packing != "none":
        lengths = (length,) * rows if train.packing == "static" else (rows * length,)
        batch = replace(batch, ids_BS=batch.ids_BS.view(1, -1), labels_BS=batch.labels_BS.view(1, -1), lengths=lengths)
    zeros_BS = torch.zeros_like(batch.ids_BS)
    mask_BS = torch.ones_like(zeros_BS, dtype=torch.bool)
    return replace(batch, positions_BS=zeros_BS, documents_BS=zeros_BS.clone(), mask_BS=mask_BS)
