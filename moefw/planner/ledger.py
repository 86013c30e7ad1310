"""The ledger: what a rank will hold, by category and by region, and where the most."""

from __future__ import annotations

from collections import Counter
from typing import Any

from attrs import asdict, evolve, frozen

from moefw.compose.assembly import Assembly
from moefw.ledger.parts import FP32, ModelMemory, RankShape
from moefw.planner.estimate import ask
from moefw.planner.placement import PlacedLayer, place
from moefw.planner.regions import WEIGHTS, RegionTotals, by_region, summed
from moefw.planner.static import Held, held, silent_policies
from moefw.planner.sweep import Peak, Sweep

OUTSIDE = "outside"
"""Embedding, final norm, head and loss."""


@frozen(kw_only=True)
class Ledger:
    """What one rank will hold, in bytes; all ranks are alike. ``silent``: the parts that say nothing of their memory.

    ``regions``: kinds of layers, regions, and their sums over layers. ``peak_bytes`` is the sum of what is ``held`` on
    the device, ``pools``, and the largest ``peak``. None where the model or the precision says nothing.
    """

    world: int
    micro_batches: int
    tokens: int
    held: Held | None
    regions: tuple[RegionTotals, ...]
    pools: int
    peak: Peak | None
    peak_bytes: int | None
    silent: tuple[str, ...]

    @property
    def totals(self) -> dict[str, int]:
        """Bytes saved, recomputed, offloaded and stashed over all layers, and outside of them."""
        return summed(self.regions)

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "totals": self.totals}


def ledger(assembly: Assembly, *, micro_batches: int | None = None) -> Ledger:
    """Return the ledger of a rank. Pure; ``micro_batches`` None: as many as the spec has."""
    train, said = assembly.spec.train, ask(assembly)
    each = assembly.layout.sizes.get("dp", 1) * train.seq_len * train.micro_batch
    count = max(1, train.tokens_per_step // each) if micro_batches is None else micro_batches
    silent = (*said.silent, *silent_policies(assembly, said.shape))
    empty = Ledger(
        world=assembly.layout.world,
        micro_batches=count,
        tokens=train.micro_batch * train.seq_len,
        held=None,
        regions=(),
        pools=0,
        peak=None,
        peak_bytes=None,
        silent=silent,
    )
    if said.model is None or said.shape is None:
        return empty
    return _filled(empty, assembly, said.model, said.shape)


def _filled(empty: Ledger, assembly: Assembly, model: ModelMemory, shape: RankShape) -> Ledger:
    policies = {region: plugin for plugin in assembly.parts.memory for region in plugin.regions}
    cache: dict[int, PlacedLayer] = {}
    layers = [cache.setdefault(id(layer), place(layer, policies, shape)) for layer in model.layers]
    lying = held(assembly, model, shape, empty.micro_batches)
    sweep = Sweep(model, shape, layers, width_of=_widths(shape), all_gradients=empty.micro_batches > 1)
    step = Peak(place="optimizer", saved=0, gathered=0, passing=lying.step_passing)
    peak = max([*sweep.peaks(), step], key=lambda moment: moment.total)
    pools = _pools(layers)
    return evolve(
        empty,
        held=lying,
        regions=_regions(model, layers),
        pools=pools,
        peak=peak,
        peak_bytes=lying.device + pools + peak.total,
    )


def _pools(layers: list[PlacedLayer]) -> int:
    """Return what policies hold on the device for what they stash."""
    return sum(wait.placement.stashed for layer in layers for wait in layer.waits)


def _widths(shape: RankShape) -> Any:
    modules = {"experts": "moe.experts", "shared": "moe.shared_expert", "attention": "attention", "mlp": "mlp"}

    def width(layer: int, unit: str) -> int:
        if unit == "embed":
            return FP32
        return shape.at(layer).formats_of(modules.get(unit, "head")).gathered

    return width


def _regions(model: ModelMemory, layers: list[PlacedLayer]) -> tuple[RegionTotals, ...]:
    counts = Counter(id(layer) for layer in layers)
    rows: dict[tuple[str, str], RegionTotals] = {}
    for layer in {id(layer): layer for layer in layers}.values():
        for name, row in by_region(layer).items():
            new, old = row.times(counts[id(layer)]), rows.get((row.kind, name))
            rows[row.kind, name] = new if old is None else _added(old, new)
    for tensor in model.saves:
        name = WEIGHTS if tensor.weights else OUTSIDE
        new, old = RegionTotals(kind=OUTSIDE, region=name, saved=tensor.nbytes), rows.get((OUTSIDE, name))
        rows[OUTSIDE, name] = new if old is None else evolve(old, saved=old.saved + new.saved)
    return tuple(rows.values())


def _added(one: RegionTotals, other: RegionTotals) -> RegionTotals:
    sums: dict[str, Any] = summed([one, other])
    return evolve(one, layers=one.layers + other.layers, **sums)
