"""Forward and backward of one micro-batch of one rank, on tensors without memory, recorded.

Of layers that are alike, three run (:mod:`moefw.planner.layers`), and FSDP does not run
(:mod:`moefw.planner.gathering`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model
from moefw.compose.spec.sections import TrainSpec
from moefw.core.contracts import Layout
from moefw.core.records import Action, Stage
from moefw.core.stages import Batch
from moefw.planner.gathering import Gathering, Reduced, Unit
from moefw.planner.layers import InPhases, RunLayer, run_layers
from moefw.planner.operations import Operations
from moefw.planner.report import Work
from moefw.planner.unconnected import OwnStages, Unconnected
from moefw.recording.places import Place
from moefw.recording.recorder import GATHERED, GRADIENTS, OPERANDS, PARAMETERS, Life, Recorder
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.runtime.parallel.gradients import add_up_in
from moefw.runtime.pipeline.player import Player
from moefw.runtime.pipeline.stage import Arrived, ModelStage
from moefw.runtime.pipeline.transfers import Step

FP32: Final = 4
BUFFERS: Final = "buffers"
BATCH: Final = "batch"
POOL: Final = "pool"
"""Storages that a policy keeps from step to step."""
SAVED: Final = (None, GATHERED)
"""Labels of the storages that forward allocates and backward frees."""


@final
class MicroBatch:
    """A model and its recorded micro-batch. Moments count changes of the memory in use.

    ``count``: the micro-batches of a step. ``gradients``: whether those of an earlier one are there. ``layers``: those
    that run. ``offloaded``: bytes of host memory by place.
    """

    def __init__(
        self, assembly: Assembly, layout: Layout, shared: Shared, recorder: Recorder, *, count: int, gradients: bool
    ) -> None:
        self.assembly, self.recorder = assembly, recorder
        self._reduced: Reduced = "micro_batch"
        if assembly.spec.train.reduce_gradients == "step" and count > 1:
            self._reduced = "step" if layout.size("pp") == 1 else "pipeline"
        self.operations = Operations(recorder, layout)
        self.sharding: Gathering | None = None
        model: Any = build_model(
            assembly, layout, torch.device("cpu"), shared, shard_by=self._shard_by, watch=recorder.places
        )
        self.model = model
        every = [RunLayer(number) for number in range(assembly.site.num_layers)]
        self.layers = run_layers(assembly, self.model) if isinstance(self.model, InPhases) else every
        self.steps: Sequence[Step] = model.link.steps(count) if layout.size("pp") > 1 else ()
        """What this rank does in a step of a pipeline; empty if there is none."""
        self.passes: dict[tuple[str, int], range] = {}
        """When each kind of pass runs through each stage of this rank, with what it receives."""
        self.link: Unconnected | None = None
        self.saved_in: dict[int, range] = {}
        """The moments between which each stage saves what its backward needs."""
        self._played: Iterator[Any] | None = None
        self._rows: list[tuple[RunLayer, int]] = []
        self._began: list[int] = []
        self._done: list[int] = []
        self.operations.learn_weights(self.model)
        recorder.label(self.model.parameters(), PARAMETERS)
        recorder.label(self.model.buffers(), BUFFERS)
        self._begin_gradients(given=gradients)
        self.offloaded: Counter[Place] = Counter()
        self.begin = self.turn = self.end = recorder.now
        """The moments before forward, between forward and backward, and after backward."""
        self._loss: Tensor | None = None

    def _shard_by(self, layout: Layout) -> Any:
        self.sharding = Gathering(layout, self.recorder, self.operations, self._reduced)
        return self.sharding

    @property
    def units(self) -> Sequence[Unit]:
        """The units of parameters that ranks share."""
        return self.sharding.units if self.sharding else ()

    def stored(self, parameter: nn.Parameter) -> Sequence[int]:
        """Return the shape of what this rank stores of a parameter, in fp32."""
        return self.sharding.shards.get(parameter, parameter.shape) if self.sharding else parameter.shape

    @contextmanager
    def weights_shared(self) -> Iterator[None]:
        """Enter the block in which micro-batches share the operands of weights that are not gathered."""
        gathered = {parameter for unit in self.units for parameter in unit.parameters}
        own = [one for one in self.model.parameters() if one not in gathered]
        with shared_by_micro_batches(own), self.sharding.open() if self.sharding else nullcontext():
            yield

    def operands(self) -> int:
        """Return the bytes of the operands that micro-batches share, those of layers that did not run included."""
        times: dict[int | None, int] = {layer.number: 1 + layer.more for layer in self.layers}
        alive = (life for life in self.recorder.alive(self.recorder.now) if life.kind == OPERANDS)
        return sum(life.nbytes * times.get(life.made_in.layer, 1) for life in alive)

    def forward(self) -> None:
        """Run forward."""
        recorder, batch = self.recorder, self._batch()
        recorder.off_device.clear()
        if self.steps:
            self._forward_in_stages(batch)
        else:
            with recorder.places.phase("forward"), self.operations:
                self._loss = self._forward(batch)
        self.turn = recorder.now
        self.offloaded.update(recorder.off_device)

    def backward(self) -> None:
        """Run backward."""
        recorder, loss = self.recorder, self._loss
        if self._played is not None:
            for _ in self._played:
                raise AssertionError("all forwards come before the first backward")
            if self._reduced == "pipeline":
                with recorder.places.phase("backward"), self.operations:
                    for unit in self.units:
                        unit.reduce_once()
        else:
            assert loss is not None, "forward comes before backward"
            self._loss = None
            with recorder.places.phase("backward"), self.operations:
                loss.backward()
                del loss
                self._end_units()
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
        if any(layer.more for layer in self.layers):
            output = self._through(model.stages[0].stage, Arrived(batch=batch))
        else:
            output = model(batch)
        if root is not None:
            root.after(None, (), output)
        loss: Tensor = output.objective * batch.loss_scale
        return loss

    def _forward_in_stages(self, batch: Batch) -> None:
        """Play the passes of one micro-batch through this rank's stages up to the first backward."""
        model = self.model
        if self.sharding is not None and self.sharding.root_unit is not None:
            self.sharding.root_unit.before(None, ())
        stages = [ModelStage(one.stage, partial(self._through, one.stage), one.awaited) for one in model.stages]
        self.link = Unconnected(model.link, [one.stage for one in stages], self.operations)
        link: Any = self.link
        self._played = Player(OwnStages(stages, link), [batch]).play(self._pass)
        for one in stages:
            began = self.recorder.now
            next(self._played)
            self.saved_in[one.stage.index] = range(began, self.recorder.now)

    @contextmanager
    def _pass(self, action: Action) -> Iterator[None]:
        began = max((window.stop for window in self.passes.values()), default=self.begin)
        with self.recorder.places.phase("forward" if action.kind == "F" else "backward"), self.operations:
            yield
            if action.kind != "F":
                self._end_units()
        self.passes[action.kind, action.stage] = range(began, self.recorder.now)

    def _end_units(self) -> None:
        for unit in self.units:
            unit.end()

    def _through(self, stage: Stage, arrived: Arrived) -> Any:
        """Run those layers of a stage that are run."""
        model = self.model
        value = model.enter(stage, arrived.batch, arrived.tensors)
        for layer in self.layers:
            if layer.number in stage.layers:
                self._rows.append((layer, len(self._began)))
                self._mark(value)
                for phase in model.phases_of(layer.number):
                    value = phase(value)
        self._mark(value)
        return model.leave(stage, value)

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
        for layer, at in self._rows:
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

    def _begin_gradients(self, *, given: bool) -> None:
        in_units = {parameter for unit in self.units for parameter in unit.parameters}
        whole = [parameter for parameter in self.model.parameters() if parameter not in in_units]
        add_up_in(self._main_dtype, whole)
        if given:
            for parameter in whole:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            if self.sharding is not None:
                self.sharding.give_gradients()

    @property
    def _main_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.assembly.spec.train.main_gradients)
        return dtype

    @property
    def frees_gradients(self) -> bool:
        """Whether the gradients of earlier micro-batches are freed in this one."""
        return self._reduced == "step"

    def main_gradients(self) -> int:
        """Return the bytes of all gradients between micro-batches."""
        shards = self.sharding.shards if self.sharding else {}
        sizes = {True: FP32, False: self._main_dtype.itemsize}
        return sum(prod(self._summed(one)) * sizes[one in shards or one.dim() < 2] for one in self.model.parameters())

    def _summed(self, parameter: nn.Parameter) -> Sequence[int]:
        """Return the shape in which micro-batches add up the gradient of a parameter."""
        return self.stored(parameter) if self._reduced == "micro_batch" else parameter.shape


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
