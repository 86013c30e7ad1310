"""From an assembly to what its parts say of themselves."""

from __future__ import annotations

from attrs import evolve, frozen

from moefw.compose.assembly import Assembly
from moefw.core.plugin import Plugin
from moefw.ledger.parts import Extent, Formats, ModelMemory, PartMemory
from moefw.ledger.protocols import SaysFormats, SaysMemory, SaysModelMemory


@frozen(kw_only=True)
class Said:
    """What the parts say. ``silent`` names those that say nothing."""

    extent: Extent | None
    model: ModelMemory | None
    silent: tuple[str, ...]


def ask(assembly: Assembly) -> Said:
    """Return what model, router, dispatcher and GEMM take on the first rank; the others are alike."""
    parts = assembly.parts
    silent: dict[str, None] = {}
    formats, high = _formats(parts.precision)
    if formats is None or high is None:
        return Said(extent=None, model=None, silent=(f"precision: {parts.precision.name}",))
    if not (formats.passing_counted and high.passing_counted):
        silent[f"precision: {parts.precision.name}, while it quantizes"] = None
    extent = _extent(assembly, formats, high)
    moe: dict[int, list[PartMemory]] = {}
    seen: dict[tuple[Formats, int], list[PartMemory]] = {}
    for number, layer in assembly.layers.items():
        here = evolve(extent.at(number), row_alignment=layer.facts.get("row_alignment", 1))
        key = (here.formats_of("moe.experts"), here.row_alignment)
        if key not in seen:
            seen[key] = _moe_parts(assembly, here, silent)
        moe[number] = seen[key]
    alignment = next((layer.facts.get("row_alignment", 1) for layer in assembly.layers.values()), 1)
    filled, budget = next(((routing.filled, dispatch.rows) for routing, dispatch, _ in moe.values()), (None, None))
    capacity = next((layer.facts.get("budget") for layer in assembly.layers.values()), None) or 1.0
    extent = evolve(extent, row_alignment=alignment, budget=budget, capacity=capacity, filled=filled)
    model = parts.model.memory(extent, moe) if isinstance(parts.model, SaysModelMemory) else None
    if model is None:
        silent[f"model: {parts.model.name}"] = None
    return Said(extent=extent, model=model, silent=tuple(silent))


def _moe_parts(assembly: Assembly, extent: Extent, silent: dict[str, None]) -> list[PartMemory]:
    parts = assembly.parts
    routing = _said(parts.routing, extent)
    routed = evolve(extent, filled=routing.filled) if routing else extent
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
    """Return those of the recipe, and of what it spares."""
    return (part.formats(), part.high_formats()) if isinstance(part, SaysFormats) else (None, None)


def _said(part: Plugin, extent: Extent) -> PartMemory | None:
    return part.memory(extent) if isinstance(part, SaysMemory) else None


def _extent(assembly: Assembly, formats: Formats, high: Formats) -> Extent:
    layout, precision, num_layers = assembly.layout, assembly.parts.precision, assembly.num_layers

    def of(layer: int, module: str) -> Formats:
        names = (f"layers.{number}.{module}" for number in (layer, layer - num_layers))
        return high if module == "head" or any(precision.spares(name) for name in names) else formats

    return Extent(
        dims=assembly.site.dims,
        layer=0,
        sequences=assembly.spec.train.micro_batch,
        seq_len=assembly.spec.train.seq_len,
        axes=layout.sizes,
        shards={side: len(layout.copies(0, side)[0]) for side in ("dense", "experts")},
        ranks_per_node=assembly.parts.parallel.ranks_per_node or layout.world,
        row_alignment=1,
        precision=of,
    )
