"""The layers that are run for a plan: up to three in a row of layers, or of blocks of layers, that are alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from attrs import frozen

from moefw.compose.assembly import Assembly
from moefw.core.records import Stage
from moefw.runtime.phases import Phase
from moefw.runtime.pipeline.stage import ModelStage
from moefw.runtime.pipeline.timeline import most_in_flight

RUN: Final = 3
"""Blocks of layers that run of a row of equal ones."""
MODULES: Final = ("attention", "mlp", "moe.experts", "moe.shared_expert")
"""The modules of a layer whose recipe depends on its number."""


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


def row_of_blocks(kinds: Sequence[Any]) -> tuple[int, int]:
    """Length and number of the equal blocks with which kinds begin: the shortest of more than three, else one layer."""
    for length in range(1, len(kinds) // (RUN + 1) + 1):
        block = kinds[:length]
        count = 1
        while kinds[count * length : (count + 1) * length] == block:
            count += 1
        if count > RUN:
            return length, count
    return 1, 1


def alike_positions(assembly: Assembly, micro_batches: int) -> Mapping[int, Sequence[int]]:
    """Positions on pp to measure, each with those whose stages are like its own, itself included.

    Of positions that are alike, the one with most in flight is measured.
    """
    if len(assembly.stages) == 1:
        return {0: (0,)}
    order = assembly.order(micro_batches)
    by_kinds: dict[str, list[int]] = {}
    for position, stages in enumerate(assembly.stages):
        kinds = repr(
            [
                (stage.is_first, stage.is_last, [facts_of(assembly, number) for number in stage.layers])
                for stage in stages
            ]
        )
        by_kinds.setdefault(kinds, []).append(position)
    chosen = {max(alike, key=lambda position: most_in_flight(order[position])): alike for alike in by_kinds.values()}
    return {position: chosen[position] for position in sorted(chosen)}


def _kind(assembly: Assembly, model: InPhases, number: int) -> Any:
    """Key that layers of one kind share: class of the module, and facts."""
    return type(model.layers[number]), facts_of(assembly, number)


def facts_of(assembly: Assembly, number: int) -> Any:
    """Description of a layer by its spec, to be compared.

    The facts of its MoE layer, the modules that its recipe keeps in high precision, how far its attention reaches, and
    whether it predicts a token further ahead. A recipe may count layers from the end, by a negative number.
    """
    layer = assembly.layers.get(number)
    names = [f"layers.{at}.{module}" for module in MODULES for at in (number, number - assembly.site.num_layers)]
    in_high_precision = tuple(assembly.parts.precision.keeps_high_precision(name) for name in names)
    num_further = getattr(assembly.parts.model, "mtp_layers", 0)
    predicts_further = number >= assembly.site.num_layers - num_further
    reach = assembly.parts.attention.reach_at(number)
    return layer and repr(sorted(layer.facts.items())), in_high_precision, reach, predicts_further
