"""Mesh arithmetic: rank -> coordinates -> groups. No process group, no torch, any world."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, final, get_args

from attrs import field, frozen

from moefw.core.contracts import LayoutPlan
from moefw.core.errors import PluginError
from moefw.core.records import Side, Zero

DENSE: Final = ("pp", "dp", "cp", "tp")
EXPERT: Final = ("pp", "edp", "ep", "etp")
COPIES: Final[Mapping[Side, tuple[str, ...]]] = {"dense": ("dp", "cp"), "experts": ("edp",)}
"""Axes along which the ranks of a mesh hold copies of the same parameters, or shard them (FSDP)."""


@final
@frozen
class Mesh:
    """Axes and their sizes, outermost first. Neighbouring ranks differ on the last axis.

    An axis may occur in several places. Its position is read from them, outermost first.
    """

    places: tuple[tuple[str, int], ...]

    @property
    def axes(self) -> frozenset[str]:
        """The names of the axes."""
        return frozenset(axis for axis, _ in self.places)

    def size(self, *axes: str) -> int:
        """Product of the sizes of ``axes``, or of all axes if none is given."""
        return math.prod(size for axis, size in self.places if not axes or axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis."""
        position: dict[str, int] = {}
        stride = self.size()
        for axis, size in self.places:
            stride //= size
            position_in_place, rank = divmod(rank, stride)
            position[axis] = position.get(axis, 0) * size + position_in_place
        return position

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only on ``axes``, in ascending order."""
        ranks = [0]
        stride = self.size()
        for axis, size in self.places:
            stride //= size
            own_position = rank // stride % size
            positions = range(size) if axis in axes else (own_position,)
            ranks = [outer + position * stride for outer in ranks for position in positions]
        return tuple(ranks)


@frozen(kw_only=True)
class MeshPlan(LayoutPlan):
    """A dense mesh and an expert mesh over the same ranks.

    ``shards``: the number of ranks over which a parameter of each mesh is sharded; 1: each rank holds all of it.
    ``zeros``: the stage of ZeRO of each mesh, see :meth:`LayoutPlan.zero`. Raises PluginError on meshes and shards that
    do not go together, and on a stage that does not exist.
    """

    dense: Mesh
    experts: Mesh
    shards: Mapping[Side, int] = field(factory=lambda: {"dense": 1, "experts": 1})
    zeros: Mapping[Side, Zero] = field(factory=lambda: {"dense": 3, "experts": 3})

    def __attrs_post_init__(self) -> None:
        dense = dict(self.dense.places)
        experts = dict(self.experts.places)
        _require(
            self.dense.size() == self.experts.size(),
            f"both meshes cover the same ranks: dense {dense} has {self.dense.size()}, experts {experts} has "
            f"{self.experts.size()}",
        )
        _require(
            self.dense.places[0] == self.experts.places[0],
            f"both meshes have the same pipeline stages, outermost: they begin with {self.dense.places[0]} and "
            f"{self.experts.places[0]}",
        )
        _require(self.dense.places[0][0] == "pp", f"pipeline stages are outermost: dense is {dense}")
        for mesh, side, due in ((self.dense, "dense", DENSE), (self.experts, "experts", EXPERT)):
            _require(
                mesh.axes == {*due},
                f"{side} has all of its axes, {', '.join(due)}, and no other: it has {', '.join(sorted(mesh.axes))}",
            )
        for side, axes in COPIES.items():
            copies = math.prod(self.sizes[axis] for axis in axes)
            num_shards = self.shards[side]
            _require(
                copies % num_shards == 0,
                f"shards of {side} divide the copies: there are {num_shards} shards and {' x '.join(axes)} = {copies} "
                "copies",
            )
            _require(
                self.zeros.get(side) in get_args(Zero),
                f"zeros names a stage of ZeRO for {side}, 1, 2 or 3: it is {dict(self.zeros)}",
            )

    @property
    def world(self) -> int:  # type: ignore[override]
        """The number of ranks."""
        return self.dense.size()

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis of both meshes."""
        dense = {axis: self.dense.size(axis) for axis in DENSE}
        experts = {axis: self.experts.size(axis) for axis in EXPERT}  # both have pp, of one size
        return dense | experts

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """A rank's position on every axis of both meshes."""
        self._check_rank(rank)
        return self.experts.coordinates(rank) | self.dense.coordinates(rank)

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only on ``axes``, all of one mesh, in ascending order."""
        self._check_rank(rank)
        for mesh in (self.dense, self.experts):
            if mesh.axes.issuperset(axes):
                return mesh.group(rank, axes)
        raise ValueError(f"axes {tuple(axes)} are not axes of one mesh: {DENSE} or {EXPERT}")

    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same parameters of a mesh as ``rank``, a row for each set that shards them."""
        ranks = self.group(rank, COPIES[side])
        num_shards = self.num_shards(side)
        return tuple(ranks[first : first + num_shards] for first in range(0, len(ranks), num_shards))

    def num_shards(self, side: Side) -> int:
        """Number of ranks that shard each parameter of a mesh."""
        return self.shards[side]

    def zero(self, side: Side) -> Zero:
        """Stage of ZeRO of the parameters of a mesh."""
        return self.zeros[side]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a world of {self.world}")


def _require(holds: bool, rule: str) -> None:
    """Raise PluginError unless a rule of meshes holds: the arithmetic of the plugin that plans them is wrong."""
    if not holds:
        raise PluginError(f"{rule}.", "Change what plan() hands to moefw.MeshPlan.")
