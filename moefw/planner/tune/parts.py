"""What an excerpt of a model measures: its layers by kind, and what lies outside of layers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from attrs import asdict, evolve, field, frozen

from moefw.planner.report import Work, work_of
from moefw.planner.tune.peaks import PhaseBytes
from moefw.runtime.parallel.cuts import even_dim
from moefw.runtime.parallel.meshes import COPIES

SIDES = tuple(COPIES)
"""The meshes of parameters."""
MICRO_BATCHES = 4
"""Micro-batches of an excerpt's step: so many that a schedule of two positions comes to its steady part."""
ENTER: Final = "enter"
"""The region of what a stage does before its layers: it receives or embeds tokens, and makes what its layers share."""
LEAVE: Final = "leave"
"""The region of what a stage does behind its layers: it passes tokens on, or computes the loss."""
Sides = Mapping[str, int]
"""A number of bytes, or of ranks, by mesh."""
SMALL: Final = 0.01
"""A parameter is small that has this share of all parameters, or less."""


@frozen(kw_only=True)
class Share:
    """What a layer, or what lies outside of layers, has on a rank: work of a micro-batch, and bytes.

    ``parameters`` and ``gradients``: held all the time. ``operands``: of weights, which micro-batches share.
    ``root``: of weights that are gathered around all layers, for each pass.
    ``phases``: those of a layer, in the order of forward. ``alone``: the same in a stage that is the only one. Backward
    of a layer that predicts a token further ahead also reaches what its stage does before its layers, if that is for it
    alone, and not for the first layer too.
    """

    work: tuple[Work, ...]
    parameters: Sides
    gradients: Sides
    operands: int
    root: int
    phases: tuple[PhaseBytes, ...] = ()
    alone: tuple[PhaseBytes, ...] = ()

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Share:
        """Share of plain data."""
        phases, alone = (tuple(PhaseBytes(**phase) for phase in data[name]) for name in ("phases", "alone"))
        return cls(**{**data, "work": tuple(map(work_of, data["work"])), "phases": phases, "alone": alone})


@frozen(kw_only=True)
class End:
    """A position of an excerpt: the first or the last of two on pp, or the only one.

    ``outside``: outside of layers, with regions of its own before and behind them. ``ends``: the work that ends a
    step, of parameters of ``held`` bytes. ``states`` and ``host``: bytes of the optimizer's states, on the device and
    in host memory. ``buffers``, ``batch`` (of a micro-batch), ``passing`` of an update, ``pools``, of ``layers``
    layers, and ``sent``, the most to another stage: bytes. ``enter``: the phase before the layers of its stage.
    ``leave``: those behind them, with the norm in front of a head.
    """

    outside: Share
    ends: tuple[Work, ...]
    held: Sides
    states: int
    host: int
    buffers: int
    batch: int
    passing: int
    pools: int
    layers: int
    sent: int
    enter: PhaseBytes
    leave: tuple[PhaseBytes, ...]

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> End:
        """End of plain data."""
        outside = Share.of_data(data["outside"])
        enter = PhaseBytes(**data["enter"])
        leave = tuple(PhaseBytes(**phase) for phase in data["leave"])
        ends = tuple(map(work_of, data["ends"]))
        return cls(**{**data, "outside": outside, "ends": ends, "enter": enter, "leave": leave})


@frozen(kw_only=True)
class Excerpt:
    """A measured excerpt. ``layers``: a share for each kind. ``ends``: its positions. ``unknown``: why there are none.

    ``copies``: the ranks that hold copies of a parameter of each mesh, or shard it, of the excerpt. ``shapes``: by
    mesh, those of parameters, as a rank computes with them. ``shards``: as for how many ranks they are cut. ``skew``:
    rows of the rank beside the mean; None: routing is even.
    """

    layers: Mapping[str, Share] = field(factory=dict)
    ends: tuple[End, ...] = ()
    copies: Sides = field(factory=dict)
    shapes: Mapping[str, tuple[tuple[int, ...], ...]] = field(factory=dict)
    shards: Sides = field(factory=dict)
    unknown: str = ""
    skew: float | None = None

    def with_work_of(self, even: Excerpt) -> Excerpt:
        """This with the work of the same excerpt under even routing, and its pools, which a skew does not change."""
        if self.unknown or even.unknown:
            return self
        layers = {kind: evolve(share, work=even.layers[kind].work) for kind, share in self.layers.items()}
        ends = tuple(
            evolve(end, outside=evolve(end.outside, work=other.outside.work), ends=other.ends, pools=other.pools)
            for end, other in zip(self.ends, even.ends, strict=True)
        )
        return evolve(self, layers=layers, ends=ends)

    def cuts(self, shards: Sides) -> tuple[int, ...]:
        """Dimension along which each shape is cut, if so many ranks share a parameter of a mesh.

        Small ones are left out: how they are cut changes next to nothing.
        """
        sizes = [(side, shape, prod(shape)) for side, shapes in self.shapes.items() for shape in shapes]
        least = SMALL * sum(size for _, _, size in sizes)
        return tuple(even_dim(shape, shards[side]) for side, shape, size in sizes if size > least)

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Excerpt:
        """Excerpt of :meth:`to_data`."""
        layers = {kind: Share.of_data(share) for kind, share in data["layers"].items()}
        shapes = {side: tuple(map(tuple, own)) for side, own in data["shapes"].items()}
        ends = tuple(map(End.of_data, data["ends"]))
        return cls(**{**data, "layers": layers, "ends": ends, "shapes": shapes})
