"""The layers that are run for a plan: up to three in a row of layers, or of blocks of layers, that are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import frozen

from moefw.compose.assembly import Assembly
from moefw.core.records import Stage
from moefw.planner.measurement.alike import RUN, facts_of, row_of_blocks
from moefw.runtime.phases import Phase
from moefw.runtime.pipeline.stage import ModelStage


@runtime_checkable
class InPhases(Protocol):
    """A model whose layers can be run apart, stage by stage: ``enter``, the phases of each layer, ``leave``."""

    layers: Any
    stages: Sequence[ModelStage]

    def enter(self, stage: Stage, batch: Any, arrived: Any = ()) -> Any:
        """Input of a stage's first layer, given what arrives from the stage before."""

    def phases_of(self, layer: int) -> Sequence[Phase]:
        """Phases of one layer."""

    def leave(self, stage: Stage, value: Any) -> Any:
        """Output of a stage, given that of its last layer."""


@frozen
class RunLayer:
    """A layer that is run, and stands for ``more`` layers behind it that are not."""

    number: int
    more: int = 0

    @property
    def stands_for(self) -> int:
        """The number of layers that it stands for, itself included."""
        return 1 + self.more


def run_layers(assembly: Assembly, model: InPhases) -> list[RunLayer]:
    """Layers that are run. Both neighbours of one that stands for others are like it.

    So whatever its memory owes to the layer before or behind it, such as a unit that FSDP gathers ahead, is that of any
    layer inside a row of layers that are alike.
    """
    layers: list[RunLayer] = []
    for model_stage in model.stages:
        numbers = model_stage.stage.layers
        kinds = [_kind(assembly, model, number) for number in numbers]
        layers += _run_of_stage(numbers, kinds)
    return layers


def _run_of_stage(numbers: Sequence[int], kinds: Sequence[Any]) -> Iterator[RunLayer]:
    """Yield the layers that run of a stage.

    Layers that are alike, or that alternate, such as those with a window and those without, are a row of equal blocks.
    Of a long row, three blocks run: the first, one that stands for the rest, and the last.
    """
    at = 0
    while at < len(numbers):
        length, count = row_of_blocks(kinds[at:])
        middle = range(at + length, at + 2 * length)
        last = range(at + (count - 1) * length, at + count * length)
        if count <= RUN:
            yield from (RunLayer(number) for number in numbers[at : last.stop])
        else:
            yield from (RunLayer(number) for number in numbers[at : middle.start])
            yield from (RunLayer(numbers[index], more=count - RUN) for index in middle)
            yield from (RunLayer(numbers[index]) for index in last)
        at = last.stop


def _kind(assembly: Assembly, model: InPhases, number: int) -> Any:
    """Key that layers of one kind share: class of the module, and facts."""
    return type(model.layers[number]), facts_of(assembly, number)
