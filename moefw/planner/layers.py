"""The layers that are run for a plan: up to three in a row of layers that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final, Protocol, runtime_checkable

from attrs import frozen

from moefw.compose.assembly import Assembly
from moefw.core.records import Stage
from moefw.runtime.phases import Phase
from moefw.runtime.pipeline.stage import ModelStage
from moefw.runtime.pipeline.timeline import most_in_flight

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
        for _, alike in groupby(model_stage.stage.layers, key=lambda number: _kind(assembly, model, number)):
            layers += _run_of_row([*alike])
    return layers


def _run_of_row(numbers: list[int]) -> list[RunLayer]:
    """Those that run of a row of layers that are alike: three at most. The middle one stands for the rest."""
    if len(numbers) <= 3:
        return [RunLayer(number) for number in numbers]
    first, middle, *_, last = numbers
    return [RunLayer(first), RunLayer(middle, more=len(numbers) - 3), RunLayer(last)]


def unlike_positions(assembly: Assembly, micro_batches: int) -> list[int]:
    """Positions on pp to measure: of those with stages that are alike, the one with most in flight."""
    if len(assembly.stages) == 1:
        return [0]
    order = assembly.order(micro_batches)
    chosen: dict[str, int] = {}
    for position, stages in enumerate(assembly.stages):
        kinds = repr(
            [(stage.is_first, stage.is_last, [_facts(assembly, number) for number in stage.layers]) for stage in stages]
        )
        if kinds not in chosen or most_in_flight(order[position]) > most_in_flight(order[chosen[kinds]]):
            chosen[kinds] = position
    return sorted(chosen.values())


def _kind(assembly: Assembly, model: InPhases, number: int) -> Any:
    """Key that layers of one kind share: class of the module, and facts."""
    return type(model.layers[number]), _facts(assembly, number)


def _facts(assembly: Assembly, number: int) -> Any:
    """Description of a layer by its spec, to be compared.

    The facts of its MoE layer, the modules that its recipe keeps in high precision, and whether it predicts a token
    further ahead. A recipe may count layers from the end, by a negative number.
    """
    layer = assembly.layers.get(number)
    names = [f"layers.{at}.{module}" for module in MODULES for at in (number, number - assembly.site.num_layers)]
    in_high_precision = tuple(assembly.parts.precision.keeps_high_precision(name) for name in names)
    num_further = getattr(assembly.parts.model, "mtp_layers", 0)
    predicts_further = number >= assembly.site.num_layers - num_further
    return layer and repr(sorted(layer.facts.items())), in_high_precision, predicts_further
