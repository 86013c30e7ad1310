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
        """Return the input of a stage's first layer, given what arrives from the stage before."""

    def phases_of(self, layer: int) -> Sequence[Phase]:
        """Return the phases of one layer."""

    def leave(self, stage: Stage, value: Any) -> Any:
        """Return the output of a stage, given that of its last layer."""


@frozen
class RunLayer:
    """A layer that is run, and stands for ``more`` layers behind it that are not."""

    number: int
    more: int = 0


def run_layers(assembly: Assembly, model: InPhases) -> list[RunLayer]:
    """Return the layers that are run. Both neighbours of one that stands for others are like it."""
    found = list[RunLayer]()
    for one in model.stages:
        for _, numbers in groupby(one.stage.layers, key=lambda number: _kind(assembly, model, number)):
            found += _of_row([*numbers])
    return found


def _of_row(numbers: list[int]) -> list[RunLayer]:
    if len(numbers) <= 3:
        return [RunLayer(number) for number in numbers]
    first, middle, *_, last = numbers
    return [RunLayer(first), RunLayer(middle, more=len(numbers) - 3), RunLayer(last)]


def unlike_positions(assembly: Assembly, micro_batches: int) -> list[int]:
    """Return the positions on pp to measure: of those with stages that are alike, the one with most in flight."""
    stages = assembly.stages
    if len(stages) == 1:
        return [0]
    order, found = assembly.parts.pipeline.order(len(stages), micro_batches), dict[Any, int]()
    for position, own in enumerate(stages):
        kinds = [(one.is_first, one.is_last, [_facts(assembly, number) for number in one.layers]) for one in own]
        best = found.setdefault(repr(kinds), position)
        if most_in_flight(order[position]) > most_in_flight(order[best]):
            found[repr(kinds)] = position
    return sorted(found.values())


def _kind(assembly: Assembly, model: InPhases, number: int) -> Any:
    """Return what is equal for layers that are alike: class, facts, and the modules kept in high precision."""
    return type(model.layers[number]), _facts(assembly, number)


def _facts(assembly: Assembly, number: int) -> Any:
    layer, precision = assembly.layers.get(number), assembly.parts.precision
    names = [f"layers.{at}.{module}" for module in MODULES for at in (number, number - assembly.site.num_layers)]
    high = tuple(precision.keeps_high_precision(name) for name in names)
    further = number >= assembly.site.num_layers - getattr(assembly.parts.model, "mtp_layers", 0)
    return layer and repr(sorted(layer.facts.items())), high, further
