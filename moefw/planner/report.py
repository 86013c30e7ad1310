"""The ledger: what a rank will hold, by category and by region, and where the most. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import asdict, fields, frozen

COLUMNS: Final = ("without_policies", "saved", "offloaded", "stashed")


@frozen(kw_only=True)
class Held:
    """Bytes of the device, but for ``host``: the states that wait on the host.

    ``step_passing``: the most that passes while gradients are added up and the optimizer updates.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    batch: int
    host: int
    step_passing: int

    @property
    def device(self) -> int:
        """All of it on the device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.batch


@frozen(kw_only=True)
class RegionTotals:
    """The bytes of a region that wait for backward, over all layers of a kind.

    ``without_policies``: bytes without memory policies. ``stashed``: bytes that a policy keeps from step to step.
    """

    kind: str
    region: str
    layers: int
    without_policies: int = 0
    saved: int = 0
    offloaded: int = 0
    stashed: int = 0


@frozen(kw_only=True)
class Peak:
    """A moment of a step, in bytes beside what is always held. Gradients that are not there yet count as negative."""

    place: str
    saved: int
    gathered: int
    passing: int
    gradients: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.saved + self.gathered + self.passing + self.gradients


@frozen(kw_only=True)
class Ledger:
    """What one rank will hold, in bytes; all ranks are alike.

    ``peak_bytes`` is the sum of what is ``held`` on the device, ``pools``, and ``peak``. ``peak`` is None, and
    ``unknown`` says why, where a part cannot run on this machine: then only ``held`` is known.
    """

    world: int
    micro_batches: int
    tokens: int
    held: Held
    regions: tuple[RegionTotals, ...] = ()
    pools: int = 0
    peak: Peak | None = None
    unknown: str = ""

    @property
    def peak_bytes(self) -> int | None:
        """The most that the rank holds at a time."""
        return None if self.peak is None else self.held.device + self.pools + self.peak.total

    @property
    def totals(self) -> dict[str, int]:
        """Bytes over all layers, and outside of them, by column."""
        return {column: sum(getattr(row, column) for row in self.regions) for column in COLUMNS}

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "totals": self.totals, "peak_bytes": self.peak_bytes}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Ledger:
        """Return the ledger of :meth:`to_data`."""
        known = {field.name: data[field.name] for field in fields(cls)}
        known |= {"held": Held(**data["held"]), "peak": data["peak"] and Peak(**data["peak"])}
        return cls(**known | {"regions": tuple(RegionTotals(**row) for row in data["regions"])})
