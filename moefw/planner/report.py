"""The ledger: the memory of a rank, by category, by region and at its peak, and its work. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from attrs import asdict, fields, frozen

COLUMNS: Final = ("without_policies", "saved", "offloaded", "stashed")


@frozen(kw_only=True)
class Held:
    """Bytes that a rank holds all the time, on the device, except ``host``: optimizer states in host memory.

    ``step_passing``: the most temporary memory while gradients are added up and the optimizer updates.
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
        """The sum on the device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.batch


@frozen(kw_only=True)
class RegionTotals:
    """The bytes of a region between forward and backward, over all layers of a kind.

    ``without_policies``: bytes saved without memory policies. ``stashed``: bytes that a policy keeps from step to step.
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
    """The peak of a step, in bytes beyond those always held. Gradients that do not exist yet count as negative.

    ``operands``: operands of weights that the step's micro-batches share.
    """

    place: str
    operands: int
    saved: int
    gathered: int
    passing: int
    gradients: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.operands + self.saved + self.gathered + self.passing + self.gradients


@frozen
class Product:
    """``times`` products of matrices, or of ``groups`` of them: (m, k) with (k, n), ``shape`` (m, n, k).

    m is the sum over the groups; for a gradient of grouped weights, k is. ``during``: ``fprop``, ``dgrad`` or
    ``wgrad``. Attention's core is one product per head: n is the length of the keys, k the sum of the widths.
    """

    operator: str
    dtype: str
    shape: tuple[int, int, int]
    groups: int
    during: str
    times: int = 1

    @property
    def flops(self) -> int:
        """The floating-point operations of all: 2 m n k each. Attention counts in full, also where it is causal."""
        return 2 * prod(self.shape) * self.times


@frozen
class Transfer:
    """``times`` collectives of one kind over a group of ``ranks``, and what this rank sends in each, in bytes.

    ``group``: its axes. ``node`` and ``network``: inside the node and between nodes, counted as in
    :mod:`moefw.testing.counting`.
    """

    kind: str
    group: str
    ranks: int
    node: int
    network: int
    times: int = 1


@frozen(kw_only=True)
class Work:
    """What a micro-batch does in a region of one layer, which stands for ``layers``; None: outside of layers.

    ``phase``: ``forward``, ``backward``, ``recompute``, or ``once``: done once a step, for all its micro-batches.
    ``operators``: all others, with the bytes that they read and write, each by itself.
    """

    layer: int | None
    layers: int
    region: str
    phase: str
    products: tuple[Product, ...]
    transfers: tuple[Transfer, ...]
    operators: int
    nbytes: int


@frozen(kw_only=True)
class Ledger:
    """The memory of one rank in bytes, and its work. All ranks of a pipeline's stage are alike.

    ``stages`` and ``position``: the size of pp, and the rank's position on it, one that needs most memory.
    ``in_flight``: the most forwards of stages whose backward has not run; regions are of one micro-batch.
    ``pools``: bytes that policies keep from step to step. ``peak`` is None if a part cannot run on this machine;
    ``unknown`` is the reason, and only ``held`` is known.
    """

    world: int
    micro_batches: int
    tokens: int
    held: Held
    stages: int = 1
    position: int = 0
    in_flight: int = 1
    regions: tuple[RegionTotals, ...] = ()
    work: tuple[Work, ...] = ()
    pools: int = 0
    peak: Peak | None = None
    unknown: str = ""

    @property
    def peak_bytes(self) -> int | None:
        """The most that the rank holds at a time: ``held`` on the device, ``pools`` and ``peak``; None: unknown."""
        return None if self.peak is None else self.held.device + self.pools + self.peak.total

    @property
    def ranks(self) -> str:
        """The ranks that have this ledger, in words; in a pipeline, those that need most memory."""
        if self.stages == 1:
            return "the rank" if self.world == 1 else f"each of {self.world} ranks"
        ranks = self.world // self.stages
        who = "the rank" if ranks == 1 else f"each of the {ranks} ranks"
        return f"{who} at position {self.position + 1} of {self.stages} on pp (passes in flight: {self.in_flight})"

    @property
    def totals(self) -> dict[str, int]:
        """The sum of all regions by column."""
        return {column: sum(getattr(row, column) for row in self.regions) for column in COLUMNS}

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "totals": self.totals, "peak_bytes": self.peak_bytes}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Ledger:
        """Ledger of :meth:`to_data`."""
        values = {field.name: data[field.name] for field in fields(cls)}
        values["held"] = Held(**data["held"])
        values["peak"] = None if data["peak"] is None else Peak(**data["peak"])
        values["regions"] = tuple(RegionTotals(**row) for row in data["regions"])
        values["work"] = tuple(_work_of(row) for row in data["work"])
        return cls(**values)


def _work_of(data: Mapping[str, Any]) -> Work:
    values = dict(data)
    values["products"] = tuple(Product(**{**row, "shape": tuple(row["shape"])}) for row in data["products"])
    values["transfers"] = tuple(Transfer(**row) for row in data["transfers"])
    return Work(**values)
