"""The ledger: the memory of a rank, by category, by region and at its peak, and its work. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

from attrs import asdict, evolve, field, fields, frozen

COLUMNS: Final = ("without_policies", "saved", "offloaded", "stashed")
AGAIN: Final = "again"
"""What a product is for that backward computes once more, although no policy asks for it: attention's scores."""
MODEL_PHASES: Final = ("forward", "backward")
ROUTER: Final = "router"
OF_SKEW: Final = ("skew", "even_peak_bytes")
"""What a ledger has of skewed routing alone."""


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

    m is the sum over the groups, of valid rows; for a gradient of grouped weights, k is. ``dtype``: of the operands.
    ``during``: ``fprop``, ``dgrad`` or ``wgrad``, or ``again``. Attention's core is one product per head: n is the
    length of the keys, k the sum of the widths, and ``scores`` is how many of all m n scores the mask shows.
    """

    operator: str
    dtype: str
    shape: tuple[int, int, int]
    groups: int
    during: str
    times: int = 1
    scores: int | None = None

    @property
    def flops(self) -> int:
        """The floating-point operations of all: 2 m n k each, or 2 k for each score that attention's mask shows."""
        rows, columns, summed = self.shape
        results = rows * columns if self.scores is None else self.scores
        return 2 * results * summed * self.times


@frozen
class Transfer:
    """``times`` collectives of one kind over a group of ``ranks``, and what this rank sends in each, in bytes.

    ``group``: its axes. ``node`` and ``network``: inside the node and between nodes, counted as in
    :mod:`moefw.testing.counting`. ``span``: from the first rank of the group to the last; by default all between them
    are in it, too.
    """

    kind: str
    group: str
    ranks: int
    node: int
    network: int
    times: int = 1
    span: int = field()

    @span.default
    def _of_neighbours(self) -> int:
        return self.ranks - 1

    def larger(self, times: float) -> Transfer:
        """This with so many times the bytes."""
        return evolve(self, node=round(times * self.node), network=round(times * self.network))


@frozen
class Sums:
    """Whole numbers that add up, each with its own."""

    def plus(self, other: Self, times: float = 1.0) -> Self:
        """Sum of this and ``times`` the other."""
        names = [field.name for field in fields(type(self))]
        return type(self)(**{name: getattr(self, name) + round(times * getattr(other, name)) for name in names})


@frozen(kw_only=True)
class OnHost(Sums):
    """What goes over the link between a GPU and its host, and what the host computes, in bytes.

    ``out`` and ``back``: to the host's memory and from it, in so many ``copies``. ``nbytes``: what operators of the
    host read and write there, each by itself.
    """

    copies: int = 0
    out: int = 0
    back: int = 0
    nbytes: int = 0


@frozen(kw_only=True)
class Updated(Sums):
    """What an update changes element by element: so many parameters, and bytes of their states.

    Nothing with a rule for matrices.
    """

    parameters: int = 0
    states: int = 0


@frozen(kw_only=True)
class Work:
    """What a micro-batch does in a region of one layer, which stands for ``layers``; None: outside of layers.

    ``phase``: ``forward``, ``backward``, ``recompute``; or done once a step, for all its micro-batches: ``once`` in
    one of them, ``gradients``, their sums over ranks and their norm, and ``optimizer``, clipping and the update.
    ``operators``: all others on the GPU, with the bytes that they read and write, each by itself. ``updated``: what of
    these is the update's.
    """

    layer: int | None
    layers: int
    region: str
    phase: str
    products: tuple[Product, ...]
    transfers: tuple[Transfer, ...]
    operators: int
    nbytes: int
    on_host: OnHost = OnHost()
    updated: Updated = Updated()

    @property
    def launches(self) -> int:
        """All operators on the GPU, products, transfers and copies among them."""
        products = sum(product.times for product in self.products)
        return self.operators + products + sum(transfer.times for transfer in self.transfers) + self.on_host.copies


def model_flops(work: Iterable[Work]) -> int:
    """Operations that the model asks for in a micro-batch, as MFU counts them: products, but none twice and no router.

    What backward computes again does not count, whoever asks for it. Megatron leaves the router out, too
    (``num_floating_point_operations`` in ``megatron/training/training.py``), and counts attention's causal half.
    """
    asked = (each for each in work if each.phase in MODEL_PHASES and each.region != ROUTER)
    return sum(each.layers * product.flops for each in asked for product in each.products if product.during != AGAIN)


@frozen(kw_only=True)
class Position:
    """Positions on pp whose stages are alike: ``at``, counted from 0, the peak of the one that needs most memory, and
    the work of each. ``peak_bytes`` None: unknown.
    """

    at: tuple[int, ...]
    peak_bytes: int | None
    work: tuple[Work, ...]


@frozen(kw_only=True)
class Ledger:
    """The memory of one rank in bytes, and its work. All ranks of a pipeline's stage are alike.

    ``ranks_per_node``: of the nodes by which transfers are counted; None: all ranks are in one.
    ``stages`` and ``position``: the size of pp, and the rank's position on it, one that needs most memory.
    ``in_flight``: the most forwards of stages whose backward has not run; regions are of one micro-batch.
    ``pools``: bytes that policies keep from step to step. ``peak`` is None if a part cannot run on this machine;
    ``unknown`` is the reason, and only ``held`` is known. ``positions``: all of pp. ``flops_per_token``: what the model
    asks for, :func:`model_flops` of all ranks; None: unknown. ``modelled``: the parts that cannot run here, each with
    that which was measured in its place. ``skew``: rows of the rank, which then is the one with most, beside the mean;
    None: routing is even. ``even_peak_bytes``: its peak under even routing. Work is of even routing in any case.
    """

    world: int
    micro_batches: int
    tokens: int
    held: Held
    ranks_per_node: int | None = None
    stages: int = 1
    position: int = 0
    in_flight: int = 1
    regions: tuple[RegionTotals, ...] = ()
    work: tuple[Work, ...] = ()
    pools: int = 0
    peak: Peak | None = None
    unknown: str = ""
    positions: tuple[Position, ...] = ()
    flops_per_token: float | None = None
    modelled: tuple[str, ...] = ()
    skew: float | None = None
    even_peak_bytes: int | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The most that the rank holds at a time: ``held`` on the device, ``pools`` and ``peak``; None: unknown."""
        return None if self.peak is None else self.held.device + self.pools + self.peak.total

    @property
    def dtype(self) -> str | None:
        """Dtype of the operands in which most operations of the model are done; None: unknown."""
        flops: Counter[str] = Counter()
        for position in self.positions:
            for each in (work for work in position.work if work.phase in MODEL_PHASES):
                for product in each.products:
                    flops[product.dtype] += len(position.at) * each.layers * product.flops
        return max(flops, key=flops.__getitem__) if flops else None

    @property
    def ranks(self) -> str:
        """The ranks that have this ledger, in words; in a pipeline, those that need most memory."""
        ranks = self.world // self.stages
        if self.skew not in (None, 1.0):
            who = f"a rank with {self.skew:g} times the mean of rows, of {ranks} ranks"
        elif self.stages == 1:
            who = "the rank" if self.world == 1 else f"each of {self.world} ranks"
        else:
            who = "the rank" if ranks == 1 else f"each of the {ranks} ranks"
        if self.stages == 1:
            return who
        return f"{who} at position {self.position + 1} of {self.stages} on pp (passes in flight: {self.in_flight})"

    @property
    def in_one_node(self) -> bool:
        """Whether transfers are counted as if all ranks were in one node, be it for want of ``ranks_per_node``."""
        return self.ranks_per_node in (None, self.world)

    @property
    def totals(self) -> dict[str, int]:
        """The sum of all regions by column."""
        return {column: sum(getattr(row, column) for row in self.regions) for column in COLUMNS}

    def with_work_of(self, even: Ledger) -> Ledger:
        """This with the work and the peak of the same step under even routing."""
        if self.unknown or even.unknown:
            return self
        positions = tuple(
            evolve(own, work=other.work) for own, other in zip(self.positions, even.positions, strict=True)
        )
        work = next(each.work for each in positions if self.position in each.at)
        return evolve(
            self,
            positions=positions,
            work=work,
            flops_per_token=even.flops_per_token,
            even_peak_bytes=even.peak_bytes,
        )

    def to_data(self) -> dict[str, Any]:
        """Plain data. What is of skewed routing is in it if routing is that."""
        data = {**asdict(self), "totals": self.totals, "peak_bytes": self.peak_bytes, "dtype": self.dtype}
        if self.skew is None:
            for name in OF_SKEW:
                del data[name]
        return data

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Ledger:
        """Ledger of :meth:`to_data`."""
        values = {field.name: data[field.name] for field in fields(cls) if field.name not in OF_SKEW}
        values |= {name: data[name] for name in OF_SKEW if name in data}
        values["held"] = Held(**data["held"])
        values["peak"] = None if data["peak"] is None else Peak(**data["peak"])
        values["regions"] = tuple(RegionTotals(**row) for row in data["regions"])
        values["work"] = tuple(work_of(row) for row in data["work"])
        values["modelled"] = tuple(data["modelled"])
        values["positions"] = tuple(_position_of(row) for row in data["positions"])
        return cls(**values)


def _position_of(data: Mapping[str, Any]) -> Position:
    work = tuple(work_of(row) for row in data["work"])
    return Position(at=tuple(data["at"]), peak_bytes=data["peak_bytes"], work=work)


def work_of(data: Mapping[str, Any]) -> Work:
    """Work of plain data."""
    values = dict(data)
    values["products"] = tuple(Product(**{**row, "shape": tuple(row["shape"])}) for row in data["products"])
    values["transfers"] = tuple(Transfer(**row) for row in data["transfers"])
    values["on_host"] = OnHost(**data["on_host"])
    values["updated"] = Updated(**data["updated"])
    return Work(**values)
