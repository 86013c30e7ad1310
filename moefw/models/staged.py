"""A model in stages: what a pipeline's schedule runs on this rank, and an evaluation through all ranks of pp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, final

import torch
from torch import Tensor, nn

from moefw.core.records import Stage
from moefw.core.stages import Batch, LayerStats, Output
from moefw.models.blocks import Stream
from moefw.models.sizes import Sizes
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.runtime.phases import Phase, straight
from moefw.runtime.pipeline.link import Link
from moefw.runtime.pipeline.stage import Arrived, ModelStage, Passed

Result = TypeVar("Result")


class Stageable(Protocol):
    """What stages need of their model."""

    options: Sizes
    tp: TensorParallel
    cuts: Mapping[int | None, SequenceCut]
    residual_dtype: torch.dtype

    @property
    def modules_of_begin(self) -> tuple[nn.Module, ...]:
        """Modules that :meth:`enter` uses."""

    @property
    def modules_of_end(self) -> tuple[nn.Module, ...]:
        """Modules that :meth:`end` uses."""

    def enter(self, stage: Stage, batch: Batch, arrived: Sequence[Tensor] = (), *, with_mtp: bool = True) -> Stream:
        """Stream with which a stage begins."""

    def phases_of(self, layer: int) -> tuple[Phase, ...]:
        """Phases of one layer."""

    def leave(self, stage: Stage, stream: Stream) -> Passed | Output:
        """Output of a stage, given the end of its stream."""

    def end(self, stream: Stream) -> Output:
        """Losses, given the end of the last stage's stream."""


@final
class StagedForward:
    """The forward of a model, stage by stage. ``held``: the stages of this rank, in order."""

    def __init__(self, model: Stageable, held: Sequence[Stage], link: Link) -> None:
        self._model = model
        self._held = held
        self.link = link
        self.stages = [self._model_stage(stage) for stage in held]

    def _model_stage(self, stage: Stage) -> ModelStage:
        """A stage as a pipeline's schedule trains it."""

        def enter(arrived: Arrived) -> Stream:
            return self._model.enter(stage, arrived.batch, arrived.tensors)

        def leave(stream: Stream) -> Passed | Output:
            return self._model.leave(stage, stream)

        def awaited(batch: Batch) -> tuple[Tensor, ...]:
            return self._awaited(stage, batch, with_mtp=True)

        begin = Phase(enter, name="begin", uses=self._model.modules_of_begin)
        end = Phase(leave, name="end", uses=self._model.modules_of_end)
        phases = (begin, *self._phases(stage, with_mtp=True), end)
        return ModelStage(stage, phases, awaited)

    def _phases(self, stage: Stage, *, with_mtp: bool) -> tuple[Phase, ...]:
        """Phases of a stage's layers. ``with_mtp``: also of those that predict further tokens."""
        layers = [layer for layer in stage.layers if with_mtp or layer < self._model.options.num_layers]
        return tuple(phase for layer in layers for phase in self._model.phases_of(layer))

    def _awaited(self, stage: Stage, batch: Batch, *, with_mtp: bool) -> tuple[Tensor, ...]:
        """Empty tensors ``(t, D)`` like those that arrive at a stage.

        Between layers that predict further tokens, what the head reads of all earlier predictions travels, too.
        """
        model = self._model
        num_tokens = batch.ids_BS.numel() // (model.cuts[batch.cp].size * model.tp.size)
        num_tensors = 1
        if with_mtp:
            num_tensors += max(0, stage.layers.start - model.options.num_layers)
        shape = (num_tokens, model.options.dim)
        device = batch.ids_BS.device
        return tuple(torch.empty(shape, dtype=model.residual_dtype, device=device) for _ in range(num_tensors))

    def evaluate(self, batch: Batch) -> Output:
        """Losses in the last stage, zero in the others. Collective over pp."""
        output, stream = self.relay(batch, self._model.end)
        if output is None:
            zero = torch.zeros((), device=batch.ids_BS.device)
            output = Output(loss_sum=zero, num_tokens=zero.long(), layers={})
        return replace(output, layers=stream.layers)

    def relay(
        self, batch: Batch, end: Callable[[Stream], Result], past: Mapping[int, Any] | None = None
    ) -> tuple[Result | None, Stream]:
        """Run a batch through all stages in turn, without the layers that predict further tokens. Collective over pp.

        Return the ``end`` of the last stage's stream, None on ranks without that stage; and the stream of this rank's
        last stage, with the statistics of all of its layers and ``past`` behind them.
        """
        result: Result | None = None
        tensors: tuple[Tensor, ...] = ()
        layers: dict[int, LayerStats] = {}
        for stage in self._held:
            if not stage.is_first and self.link.leaves(stage.index - 1):
                awaited = self._awaited(stage, batch, with_mtp=False)
                tensors = self.link.receive(stage.index, "forward", awaited)()
            entering = self._model.enter(stage, batch, tensors, with_mtp=False)
            entering = replace(entering, layers=layers, past=past)
            stream: Stream = straight(self._phases(stage, with_mtp=False))(entering)
            layers = {**stream.layers}
            past = stream.past
            tensors = stream.passed
            if stage.is_last:
                result = end(stream)
            elif self.link.leaves(stage.index):
                self.link.send(stage.index, "forward", tensors)
        self.link.flush()
        return result, stream
