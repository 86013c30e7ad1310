"""Mesh arithmetic: rank -> coordinates -> groups. No process group, any world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from moefw.core.contracts import LayoutPlan

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")


@frozen(kw_only=True)
class FoldedPlan(LayoutPlan):
    """Sizes of both meshes, outermost axis first: the last axis joins neighbouring ranks."""

    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int

    def __attrs_post_init__(self) -> None:
        assert self.dp * self.cp * self.tp == self.edp * self.ep * self.etp, "both meshes cover the same ranks"

    @property
    def world(self) -> int:  # type: ignore[override]
        """The number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis of both meshes."""
        return {axis: getattr(self, axis) for axis in dict.fromkeys(DENSE + EXPERT)}

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return a rank's position on every axis of both meshes."""
        return self._position(rank, EXPERT) | self._position(rank, DENSE)

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only on ``axes``, all of one mesh, in mesh order."""
        mesh = DENSE if set(axes) <= set(DENSE) else EXPERT
        if not set(axes) <= set(mesh):
            raise ValueError(f"axes {tuple(axes)} are not axes of one mesh: {DENSE} or {EXPERT}")
        place = self._position(rank, mesh)
        ranks = [0]
        for axis in mesh:
            size = getattr(self, axis)
            positions = range(size) if axis in axes else (place[axis],)
            ranks = [outer * size + position for outer in ranks for position in positions]
        return tuple(ranks)

    def _position(self, rank: int, mesh: Sequence[str]) -> dict[str, int]:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a world of {self.world}")
        place = {}
        for axis in reversed(mesh):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place
