"""From an assembly to what its parts say of themselves."""

from __future__ import annotations

from attrs import evolve, frozen

from moefw.compose.assembly import Assembly
from moefw.core.plugin import Plugin
from moefw.ledger.parts import Formats, ModelMemory, PartMemory, RankShape
from moefw.ledger.protocols import SaysFormats, SaysMemory, SaysModelMemory


@frozen(kw_only=True)
class Estimate:
    """What the parts say. ``silent`` names those that say nothing."""

    shape: RankShape | None
    model: ModelMemory | None
    silent: tuple[str, ...]


def ask(assembly: Assembly) -> Estimate:
    """Return what model, router, dispatcher and GEMM take on the first rank; the others are alike."""
    parts = assembly.parts
    silent: dict[str, None] = {}
    formats, high = _formats(parts.precision)
    if formats is None or high is None:
        return Estimate(shape=None, model=None, silent=(f"precision: {parts.precision.name}",))
    if not (formats.passing_counted and high.passing_counted):
        silent[f"precision: {parts.precision.name}, while it quantizes"] = None
    shape = _rank_shape(assembly, formats, high)
    moe: dict[int, list[PartMemory]] = {}
    seen: dict[tuple[Formats, int], list[PartMemory]] = {}
    for number, layer in assembly.layers.items():
        here = evolve(shape.at(number), row_alignment=layer.facts.get("row_alignment", 1))
        key = (here.formats_of("moe.experts"), here.row_alignment)
        if key not in seen:
            seen[key] = _moe_parts(assembly, here, silent)
        moe[number] = seen[key]
    alignment = next((layer.facts.get("row_alignment", 1) for layer in assembly.layers.values()), 1)
    filled, budget = next(((routing.filled, dispatch.rows) for routing, dispatch, _ in moe.values()), (None, None))
    capacity = next((layer.facts.get("budget") for layer in assembly.layers.values()), None) or 1.0
    shape = evolve(shape, row_alignment=alignment, budget=budget, capacity=capacity, filled=filled)
    model = parts.model.memory(shape, moe) if isinstance(parts.model, SaysModelMemory) else None
    if model is None:
        silent[f"model: {parts.model.name}"] = None
    return Estimate(shape=shape, model=model, silent=tuple(silent))


def _moe_parts(assembly: Assembly, shape: RankShape, silent: dict[str, None]) -> list[PartMemory]:
    parts = assembly.parts
    routing = _said(parts.routing, shape)
    routed = evolve(shape, filled=routing.filled) if routing else shape
    dispatch = _said(parts.dispatch, routed)
    known = evolve(routed, budget=dispatch.rows) if dispatch else routed
    said = {
        f"routing: {parts.routing.name}": routing,
        f"dispatch: {parts.dispatch.name}": dispatch,
        f"gemm: {parts.gemm.name}": _said(parts.gemm, known),
    }
    silent.update({name: None for name, memory in said.items() if memory is None})
    return [memory or PartMemory() for memory in said.values()]


def _formats(part: Plugin) -> tuple[Formats | None, Formats | None]:
    """Return those of the recipe, and of what it keeps in high precision."""
    return (part.formats(), part.fallback_formats()) if isinstance(part, SaysFormats) else (None, None)


def _said(part: Plugin, shape: RankShape) -> PartMemory | None:
    return part.memory(shape) if isinstance(part, SaysMemory) else None


def _rank_shape(assembly: Assembly, formats: Formats, high: Formats) -> RankShape:
    layout, precision, num_layers = assembly.layout, assembly.parts.precision, assembly.site.num_layers

    def of(layer: int, module: str) -> Formats:
        names = (f"layers.{number}.{module}" for number in (layer, layer - num_layers))
        return high if module == "head" or any(precision.keeps_high_precision(name) for name in names) else formats

    return RankShape(
        dims=assembly.site.dims,
        layer=0,
        sequences=assembly.spec.train.micro_batch,
        seq_len=assembly.spec.train.seq_len,
        axes=layout.sizes,
        shards={side: len(layout.copies(0, side)[0]) for side in ("dense", "experts")},
        ranks_per_node=assembly.site.ranks_per_node or layout.world,
        row_alignment=1,
        precision=of,
    )
