"""What waits between forward and backward, by region."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, frozen

from moefw.planner.placement import PlacedLayer

WEIGHTS = "weights"
"""Where copies of parameters are counted, whatever region saves them."""


@frozen(kw_only=True)
class RegionTotals:
    """The bytes of a region, of one layer or of all. ``layers``: how many have it."""

    kind: str
    region: str
    layers: int = 1
    saved: int = 0
    recomputed: int = 0
    offloaded: int = 0
    stashed: int = 0

    def times(self, layers: int) -> RegionTotals:
        """Return the sum over so many layers that are alike."""
        numbers = {name: getattr(self, name) * layers for name in ("saved", "recomputed", "offloaded", "stashed")}
        return evolve(self, layers=layers, **numbers)


def by_region(layer: PlacedLayer) -> dict[str, RegionTotals]:
    """Return the totals of one layer by region, copies of weights apart."""
    found: dict[str, RegionTotals] = {}
    for wait in layer.waits:
        name = WEIGHTS if wait.tensor.weights else wait.region
        row = found.get(name) or RegionTotals(kind=layer.layer.kind, region=name)
        found[name] = evolve(
            row,
            saved=row.saved + wait.placement.kept,
            recomputed=row.recomputed + wait.dropped,
            offloaded=row.offloaded + wait.placement.offloaded,
            stashed=row.stashed + wait.placement.stashed,
        )
    return found


def summed(rows: Iterable[RegionTotals]) -> dict[str, int]:
    """Return the totals of all rows by column."""
    found = dict.fromkeys(("saved", "recomputed", "offloaded", "stashed"), 0)
    for row in rows:
        for name in found:
            found[name] += getattr(row, name)
    return found
