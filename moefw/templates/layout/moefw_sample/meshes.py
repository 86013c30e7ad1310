"""The arithmetic of ``sample``: rank -> coordinates -> groups. No process group, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import moefw
from attrs import frozen

DENSE, EXPERT = ("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")
"""The axes of both meshes, the last joins neighbours. Those that are not used have size 1: others ask for them."""


@frozen(kw_only=True)
class SamplePlan(moefw.LayoutPlan):
    """Rank ``r`` is ``r`` on dp, ``r // ep`` on edp and ``r % ep`` on ep."""

    world: int
    ep: int

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis."""
        ones = dict.fromkeys(DENSE + EXPERT, 1)
        return {**ones, "dp": self.world, "edp": self.world // self.ep, "ep": self.ep}

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return a rank's position on every axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a world of {self.world}")
        zeros = dict.fromkeys(DENSE + EXPERT, 0)
        return {**zeros, "dp": rank, "edp": rank // self.ep, "ep": rank % self.ep}

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only on ``axes``, all of one mesh, in mesh order."""
        place = self.coordinates(rank)
        if not (set(axes) <= set(DENSE) or set(axes) <= set(EXPERT)):
            raise ValueError(f"axes {tuple(axes)} are not axes of one mesh: {DENSE} or {EXPERT}")
        if "dp" in axes or {"edp", "ep"} <= set(axes):
            return tuple(range(self.world))
        if "edp" in axes:
            return tuple(range(place["ep"], self.world, self.ep))
        if "ep" in axes:
            return tuple(range(rank - place["ep"], rank - place["ep"] + self.ep))
        return (rank,)
