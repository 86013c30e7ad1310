"""The layers that are run for a plan: up to three in a row of layers that are alike."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final, Protocol, runtime_checkable

from attrs import frozen

from moefw.compose.assembly import Assembly

MODULES: Final = ("attention", "mlp", "moe.experts", "moe.shared_expert")
"""The modules of a layer whose recipe depends on its number."""


@runtime_checkable
class InPhases(Protocol):
    """A model whose layers can be run apart: ``begin``, the ``phases`` of each of its ``layers``, ``end``."""

    layers: Any

    def begin(self, batch: Any) -> Any:
        """Return the input of the first layer."""

    def end(self, value: Any) -> Any:
        """Return the output of the model, given that of the last layer."""


@frozen
class RunLayer:
    """A layer that is run, and stands for ``more`` layers behind it that are not."""

    number: int
    more: int = 0


def run_layers(assembly: Assembly, model: InPhases) -> list[RunLayer]:
    """Return the layers that are run. Both neighbours of one that stands for others are like it."""
    alike = groupby(range(assembly.site.num_layers), key=lambda number: _kind(assembly, model, number))
    return [layer for _, numbers in alike for layer in _of_row([*numbers])]


def _of_row(numbers: list[int]) -> list[RunLayer]:
    if len(numbers) <= 3:
        return [RunLayer(number) for number in numbers]
    first, middle, *_, last = numbers
    return [RunLayer(first), RunLayer(middle, more=len(numbers) - 3), RunLayer(last)]


def _kind(assembly: Assembly, model: InPhases, number: int) -> Any:
    """Return what is equal for layers that are alike: class, facts, and the modules kept in high precision."""
    layer, precision = assembly.layers.get(number), assembly.parts.precision
    names = [f"layers.{at}.{module}" for module in MODULES for at in (number, number - assembly.site.num_layers)]
    high = tuple(precision.keeps_high_precision(name) for name in names)
    return type(model.layers[number]), layer and repr(sorted(layer.facts.items())), high
