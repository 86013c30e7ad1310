"""``sample``: a parallel layout."""

from __future__ import annotations

from typing import ClassVar

import moefw
from attrs import field, frozen
from attrs.validators import ge

moefw_api = ">=3,<4"


@frozen
class Sample(moefw.LayoutPlugin):
    """Attention is data-parallel over all ranks; each ``ep`` neighbouring ranks split the experts."""

    name: ClassVar[str] = "sample"

    ep: int = field(default=1, validator=ge(1))
    """Number of neighbouring ranks that split the experts; it divides the world."""

    def plan(self, world: int | None) -> moefw.MeshPlan:
        """Meshes of ``world`` ranks; None: of the smallest world that fits, ``ep`` ranks.

        Axes are ordered from outermost to innermost, so the last one joins neighbouring ranks. Each mesh has all of its
        axes, even those of size 1, because other parts use them.
        """
        world = self.ep if world is None else world
        if world < 1 or world % self.ep:
            fix = f"Start a multiple of {self.ep} ranks, or change ep."
            raise moefw.PlanError(f"{world} ranks cannot be split into groups of ep {self.ep}.", fix)
        return moefw.MeshPlan(
            dense=moefw.Mesh((("pp", 1), ("dp", world), ("cp", 1), ("tp", 1))),
            experts=moefw.Mesh((("pp", 1), ("edp", world // self.ep), ("ep", self.ep), ("etp", 1))),
        )


@moefw.hookimpl
def moefw_layouts() -> list[type[moefw.LayoutPlugin]]:
    """Declare the layout."""
    return [Sample]
