"""Layers, and positions on pp, that are alike by what their spec says of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from moefw.compose.assembly import Assembly
from moefw.runtime.pipeline.timeline import most_in_flight

RUN: Final = 3
"""Blocks of layers that run of a row of equal ones."""
MODULES: Final = ("attention", "mlp", "moe.experts", "moe.shared_expert")
"""The modules of a layer whose recipe depends on its number."""


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
