"""A stage of a model as a pipeline runs it, and what travels between two stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol, runtime_checkable

from attrs import frozen
from torch import Tensor

from moefw.core.records import Stage
from moefw.core.stages import Batch, LayerStats, tensor_dataclass
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.phases import Phase
from moefw.runtime.pipeline.link import Link


@tensor_dataclass
class Arrived:
    """The input of a stage: its own batch, and the tensors that the stage before passed on."""

    batch: Batch
    tensors: tuple[Tensor, ...] = ()


@tensor_dataclass
class Passed:
    """The output of a stage that is not the last: tensors for the next one, and the statistics of its MoE layers."""

    tensors: tuple[Tensor, ...]
    layers: Mapping[int, LayerStats] = field(default_factory=dict)


@frozen(eq=False)
class ModelStage:
    """A stage of a model on this rank.

    ``phases``: from :class:`Arrived` to :class:`Passed`, or in the last stage to the model's
    :class:`moefw.core.stages.Output`. ``awaited`` returns empty tensors like those that arrive, which depend on the
    batch alone.
    """

    stage: Stage
    phases: Sequence[Phase]
    awaited: Callable[[Batch], tuple[Tensor, ...]]


@runtime_checkable
class Pipelined(Protocol):
    """A model that a pipeline can run: this rank's stages, and the way between all of them."""

    stages: Sequence[ModelStage]
    link: Link


def names_in_stages(own: Iterable[str], model: Any) -> set[str]:
    """Names that ranks have in all stages of a model, given those of this rank. Collective over pp."""
    group = model.link.group if isinstance(model, Pipelined) else None
    return {name for names in everywhere(sorted(own), group) for name in names}
