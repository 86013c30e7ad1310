"""Forward and backward of one micro-batch of one rank, on tensors without memory, recorded.

Of layers that are alike, three run (:mod:`moefw.planner.measurement.layers`), and FSDP does not run
(:mod:`moefw.planner.measurement.gathering`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Final, final

import torch
from attrs import frozen
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model
from moefw.compose.spec.sections import TrainSpec
from moefw.core.contracts import Layout
from moefw.core.records import Action, GemmPass, Stage
from moefw.core.stages import Batch
from moefw.planner.measurement.gathering import Gathering, Reduced, Unit
from moefw.planner.measurement.layers import InPhases, RunLayer, run_layers
from moefw.planner.measurement.operations import Operations
from moefw.planner.measurement.recorded_stage import PlacedWgrads, RecordedStage
from moefw.planner.measurement.stages_without_peers import OwnStages, Unconnected
from moefw.planner.report import Work
from moefw.planner.skew import EVEN
from moefw.recording.places import Place
from moefw.recording.recorder import GATHERED, GRADIENTS, OPERANDS, PARAMETERS, Life, Recorder
from moefw.recording.skew import Skew
from moefw.runtime.compute.weights import TRAINING, shared_by_micro_batches
from moefw.runtime.parallel.gradients import Gradients, add_up_in
from moefw.runtime.phases import Phase, straight
from moefw.runtime.pipeline.player import Player
from moefw.runtime.pipeline.stage import Arrived, ModelStage, Pipelined
from moefw.runtime.pipeline.transfers import Step

FP32: Final = 4
"""Bytes of an element."""
BUFFERS: Final = "buffers"
BATCH: Final = "batch"
POOL: Final = "pool"
"""Storages that a policy keeps from step to step."""
RegionsAround = tuple[str, str]
"""The names of the regions before the layers of a stage and behind them."""
SAVED: Final = (None, GATHERED)
"""Labels of the storages that forward allocates and backward frees."""


@frozen(kw_only=True)
class Recording:
    """Which micro-batch of a step is recorded, and what of the model runs for it.

    ``count``: the number of micro-batches of a step. ``gradients``: whether gradients of an earlier micro-batch exist
    when this one begins. ``passes``: those for which operands of weights are made. ``by_phase``: whether each phase has
    a graph of its own although the assembly's schedule does not ask for that. ``regions_around``: those of what stages
    do before and behind their layers; None: that is outside of all regions. ``only``: the layers that are built and
    run, of an earlier recording, which has noted their work; None: these are chosen, and all are built. ``skew``: rows
    of the rank beside the mean; None: routing is even. ``cut_for``: by side, as for how many ranks FSDP cuts
    parameters, if it is not for those that share them.
    """

    count: int
    gradients: bool
    passes: Sequence[GemmPass] = TRAINING
    by_phase: bool = False
    regions_around: RegionsAround | None = None
    only: Sequence[RunLayer] | None = None
    skew: float | None = None
    cut_for: Mapping[str, int] = MappingProxyType({})


@final
class MicroBatch:
    """A model and its recorded micro-batch. A moment is a number of changes of the memory in use.

    ``routing``: that of the world around it, if it is skewed. ``layers``: the layers that run. ``offloaded``: bytes of
    host memory by place.
    """

    def __init__(
        self,
        assembly: Assembly,
        layout: Layout,
        shared: Shared,
        recorder: Recorder,
        recording: Recording,
        routing: Skew | None,
    ) -> None:
        self.assembly = assembly
        self.recorder = recorder
        self.recording = recording
        self._routing = routing
        self.operations = Operations(recorder, layout)
        self._noting: AbstractContextManager[Any] = self.operations if recording.only is None else nullcontext()
        self.sharding: Gathering | None = None
        self.model: Any = self._built(layout, shared)
        self.layers: Sequence[RunLayer] = self._layers_that_run()
        ends_by_phase = self._ends_by_phase(layout)
        self.steps: Sequence[Step] = ()
        """What this rank does in a step of a pipeline, or phase by phase; empty if it does neither."""
        if self._is_played(layout) or ends_by_phase:
            self.steps = self.model.link.steps(recording.count)
        runs_by_phase = assembly.parts.pipeline.merges or assembly.spec.train.delay_wgrads or ends_by_phase
        self._by_phase = recording.by_phase or runs_by_phase
        self.operations.learn_weights(self.model)
        recorder.label(self.model.parameters(), PARAMETERS)
        recorder.label(self.model.buffers(), BUFFERS)
        self._begin_gradients(exist=recording.gradients)
        self.begin = recorder.now
        """The moment before forward."""
        self.turn = recorder.now
        """The moment between forward and backward."""
        self.end = recorder.now
        """The moment after backward."""
        self.offloaded: Counter[Place] = Counter()
        self.stages: dict[int, RecordedStage] = {}
        """The stages of this rank that ran, by index."""
        self.saved_in: dict[int, range] = {}
        """The moments between which forward of each stage saves what its backward needs."""
        self.passes: dict[tuple[str, int], range] = {}
        """The moments of the one recorded pass of each kind, ``F`` or ``B``, through each stage of this rank.

        A pass begins where the one before ends, so the buffers that it receives count as its own.
        """
        self.link: Unconnected | None = None
        self._played: Iterator[Any] | None = None
        """The passes that are left of a micro-batch that is played; None: it is not played."""
        self._loss: Tensor | None = None

    def _built(self, layout: Layout, shared: Shared) -> Any:
        """The model, with all layers or those that the recording names."""
        only = self.recording.only
        return build_model(
            self.assembly,
            layout,
            torch.device("cpu"),
            shared,
            shard_by=self._shard_by,
            watch=self.recorder.places,
            only=None if only is None else [layer.number for layer in only],
        )

    def _shard_by(self, layout: Layout) -> Any:
        """What stands for FSDP in the model that is built."""
        recording = self.recording
        reduced_once: Reduced = "micro_batch"
        if recording.count > 1:
            reduced_once = "later" if self._is_played(layout) or not recording.gradients else "step"
        self.sharding = Gathering(
            layout,
            self.recorder,
            self.operations,
            reduced_once=reduced_once,
            main_dtype=self._main_dtype,
            is_first=not recording.gradients,
            only=recording.only,
            cut_for=recording.cut_for,
        )
        return self.sharding

    def _layers_that_run(self) -> Sequence[RunLayer]:
        if self.recording.only is not None:
            return self.recording.only
        if isinstance(self.model, InPhases):
            return run_layers(self.assembly, self.model)
        return [RunLayer(number) for number in range(self.assembly.site.num_layers)]

    def _is_played(self, layout: Layout) -> bool:
        """Whether every micro-batch of a step runs in passes of a schedule."""
        return layout.size("pp") > 1 or self.assembly.parts.pipeline.merges or self.assembly.spec.train.delay_wgrads

    def _ends_by_phase(self, layout: Layout) -> bool:
        """Whether the last micro-batch runs by phases, as its gradients are summed over ranks meanwhile.

        It needs the most.
        """
        is_pipelined = isinstance(self.model, Pipelined)
        if self.sharding is not None or not is_pipelined:
            return False
        return Gradients(self.model, layout, self._main_dtype).start_early

    @property
    def units(self) -> Sequence[Unit]:
        """The units of parameters that ranks share."""
        return self.sharding.units if self.sharding else ()

    def stored(self, parameter: nn.Parameter) -> Sequence[int]:
        """Shape of what this rank stores of a parameter: in fp32, or as its folder has it if it is frozen."""
        if self.sharding is None:
            return parameter.shape
        return self.sharding.shards.get(parameter, parameter.shape)

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether FSDP shards a parameter."""
        return self.sharding is not None and parameter in self.sharding.shards

    def num_sharing(self, parameter: nn.Parameter) -> int:
        """Number of ranks that share a parameter."""
        return next((unit.shards for unit in self.units if any(own is parameter for own in unit.parameters)), 1)

    @contextmanager
    def weights_shared(self) -> Iterator[None]:
        """Enter the block in which micro-batches share the operands of weights that are not gathered."""
        gathered = {parameter for unit in self.units for parameter in unit.parameters}
        not_gathered = [parameter for parameter in self.model.parameters() if parameter not in gathered]
        with shared_by_micro_batches(not_gathered, self.recording.passes) as step:
            if self.sharding is not None:
                self.sharding.step = step  # units add their parameters when they are first gathered
            yield

    def operands(self) -> int:
        """Bytes of the operands that micro-batches share, those of layers that did not run included."""
        num_alike: dict[int | None, int] = {layer.number: layer.stands_for for layer in self.layers}
        operands = [life for life in self.recorder.alive(self.recorder.now) if life.kind == OPERANDS]
        return sum(life.nbytes * num_alike.get(life.made_in.layer, 1) for life in operands)

    @property
    def skew(self) -> float | None:
        """Rows of the rank beside the mean; None: routing is even. 1 where no router chooses by scores."""
        if self._routing is None:
            return None
        return self._routing.factor if self._routing.is_met else EVEN

    def forward(self, *, dropless: bool = False) -> None:
        """Run forward. ``dropless``: as of a step that runs again without budgets of rows."""
        recorder = self.recorder
        batch = replace(self._batch(), dropless=dropless)
        recorder.off_device.clear()
        if self.steps:
            self._forward_in_stages(batch)
        else:
            with recorder.places.phase("forward"), self._noting:
                self._loss = self._forward(batch)
        self.turn = recorder.now
        self.offloaded.update(recorder.off_device)

    def backward(self) -> None:
        """Run backward. What the micro-batch leaves behind gets its label: gradients, or the pool of a policy."""
        recorder = self.recorder
        loss = self._loss
        if self._played is not None:
            for _, output in self._played:
                assert output is None, "all forwards come before the first backward"
            with recorder.places.phase("backward"), self._noting:
                for unit in self.units:
                    if unit.adds_up_whole:
                        unit.reduce_behind_passes()
        else:
            assert loss is not None, "forward comes before backward"
            self._loss = None  # like ``del loss`` below: a reference to the graph would keep its storages in use
            with recorder.places.phase("backward"), self._noting:
                loss.backward()
                del loss
                self._end_units()
        self.end = recorder.now
        gradients = [unit.grads for unit in self.units if unit.grads is not None]
        gradients += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        recorder.label(gradients, GRADIENTS)
        for life in recorder.alive(self.end):
            if life.began > self.begin and life.kind is None:
                life.kind = POOL

    def evaluate(self, count: int) -> int:
        """Most bytes that an evaluation of ``count`` batches allocates at a time, without the batches.

        All layers run, and save nothing. The second batch, which is like all later ones, begins with the operands of
        all weights.
        """
        recorder = self.recorder
        batch = replace(self._batch(), dropless=True)
        self.model.eval()
        held = sum(life.nbytes for life in recorder.alive(recorder.now))
        recorder.start()
        with torch.no_grad():
            for _ in range(min(count, 2)):
                self.model(batch)
        return recorder.peak_bytes - held

    def work(self) -> Iterator[Work]:
        """Yield the operators that ran, by layer, region and pass."""
        return self.operations.work({layer.number: layer.stands_for for layer in self.layers})

    def _forward(self, batch: Batch) -> Tensor:
        model = self.model
        root = None if self.sharding is None else self.sharding.root_unit
        if root is not None:
            root.before(None, ())
        if any(layer.more for layer in self.layers):
            output = straight(self._recorded(model.stages[0].stage).phases)(Arrived(batch=batch))
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
        stages = [
            ModelStage(stage=whole.stage, phases=self._recorded(whole.stage).phases, awaited=whole.awaited)
            for whole in model.stages
        ]
        self.link = Unconnected(model.link, [shortened.stage for shortened in stages], self.operations)
        link: Any = self.link
        player = Player(
            OwnStages(stages, link),
            [batch],
            delay_wgrads=self.assembly.spec.train.delay_wgrads,
            by_phase=self._by_phase,
            new_wgrads=partial(PlacedWgrads, self.recorder.places),
        )
        self._played = player.play(self._pass)
        for shortened in stages:
            began = self.recorder.now
            next(self._played)
            self.saved_in[shortened.stage.index] = range(began, self.recorder.now)

    @contextmanager
    def _pass(self, action: Action, beside: Action | None) -> Iterator[None]:
        """Record one pass of a stage."""
        began = max((window.stop for window in self.passes.values()), default=self.begin)
        with self.recorder.places.phase("forward" if action.kind == "F" else "backward"), self._noting:
            yield
            if action.kind != "F":
                self._end_units()
        self.passes[action.kind, action.stage] = range(began, self.recorder.now)
        self.stages[action.stage].end(action.kind, began, self.recorder.now)

    def _end_units(self) -> None:
        for unit in self.units:
            unit.end()

    def _recorded(self, stage: Stage) -> RecordedStage:
        """A stage with those of its layers that are run, whose phases note when they begin."""
        model = self.model

        def enter(arrived: Arrived) -> Any:
            return model.enter(stage, arrived.batch, arrived.tensors)

        def leave(value: Any) -> Any:
            return model.leave(stage, value)

        if self.recording.regions_around is not None:
            before, behind = self.recording.regions_around
            enter = self.recorder.places.inside(before, None, enter)
            leave = self.recorder.places.inside(behind, None, leave)
        recorded = RecordedStage(self.recorder, by_phase=self._by_phase)
        recorded.add(Phase(enter))
        for layer in self.layers:
            if layer.number in stage.layers:
                own = {*model.layers[layer.number].modules()}
                for phase in model.phases_of(layer.number):
                    # Behind the last layer comes a norm that is not of it.
                    is_of_layer = not phase.uses or not own.isdisjoint(phase.uses)
                    recorded.add(phase, layer if is_of_layer else None)
        recorded.add(Phase(leave))
        self.stages[stage.index] = recorded
        return recorded

    def saved(self) -> Iterator[Life]:
        """Yield the storages that forward leaves for backward, without batch, gradients and pools."""
        return (life for life in self.recorder.alive(self.turn) if life.began > self.begin and life.kind in SAVED)

    def _batch(self) -> Batch:
        train = self.assembly.spec.train
        ids_BS = torch.zeros(train.micro_batch, train.seq_len, dtype=torch.int64)
        labels_BS = ids_BS.clone()
        seeds_B = torch.arange(train.micro_batch)
        batch = Batch(ids_BS=ids_BS, labels_BS=labels_BS, seeds_B=seeds_B, loss_scale=torch.ones(()))
        batch = as_trained(batch, train)
        tensors = (ids_BS, labels_BS, seeds_B, batch.positions_BS, batch.documents_BS, batch.mask_BS)
        self.recorder.label([tensor for tensor in tensors if tensor is not None], BATCH)
        return batch

    def _begin_gradients(self, *, exist: bool) -> None:
        """Choose the dtype of gradients that FSDP does not shard. Make all gradients, if they ``exist`` already."""
        in_units = {parameter for unit in self.units for parameter in unit.parameters}
        unsharded = [each for each in self.model.parameters() if each not in in_units and each.requires_grad]
        add_up_in(self._main_dtype, unsharded)
        if exist:
            for parameter in unsharded:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            if self.sharding is not None:
                self.sharding.give_gradients()

    @property
    def _main_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.assembly.spec.train.main_gradients)
        return dtype

    @property
    def gathers_once(self) -> bool:
        """Whether units keep what they gather for all micro-batches of a step: the first differs from all later."""
        return any(unit.is_kept for unit in self.units)

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients of earlier micro-batches are freed in this one."""
        return any(unit.reduced == "step" for unit in self.units)

    def main_gradients(self) -> dict[nn.Parameter, int]:
        """Bytes in which micro-batches add up the gradient of each parameter that trains.

        ``train.main_gradients`` is the dtype of matrices that FSDP does not shard, and of all that it reduces once a
        step, which is added up whole.
        """
        whole = frozenset() if self.sharding is None else self.sharding.added_up_whole
        found = {}
        for parameter in (each for each in self.model.parameters() if each.requires_grad):
            is_matrix_of_rank = parameter.dim() > 1 and not self.is_sharded(parameter)
            if parameter in whole or is_matrix_of_rank:
                found[parameter] = parameter.numel() * self._main_dtype.itemsize
            else:
                found[parameter] = prod(self.stored(parameter)) * FP32
        return found


def as_trained(batch: Batch, train: TrainSpec) -> Batch:
    """Batch with positions, documents and mask, if ``train`` masks documents; otherwise as it is.

    Each sequence is one document. With packing, the batch becomes one row, a full pack: of its sequences where packing
    is ``static``, otherwise of one document as long as all of them.
    """
    if not train.masks_documents:
        return batch
    rows, length = batch.ids_BS.shape
    if train.packing != "none":
        lengths = (length,) * rows if train.packing == "static" else (rows * length,)
        ids_BS = batch.ids_BS.view(1, -1)
        labels_BS = batch.labels_BS.view(1, -1)
        batch = replace(batch, ids_BS=ids_BS, labels_BS=labels_BS, lengths=lengths)
    zeros_BS = torch.zeros_like(batch.ids_BS)
    mask_BS = torch.ones_like(zeros_BS, dtype=torch.bool)
    return replace(batch, positions_BS=zeros_BS, documents_BS=zeros_BS.clone(), mask_BS=mask_BS)
