"""``sample``: a parallel layout."""

from __future__ import annotations

from typing import ClassVar

import moefw
from attrs import field, frozen
from attrs.validators import ge

from moefw_sample.meshes import SamplePlan

moefw_api = ">=1,<2"


@frozen
class Sample(moefw.LayoutPlugin):
    """Attention is data-parallel over all ranks; each ``ep`` neighbouring ranks share out the experts."""

    name: ClassVar[str] = "sample"

    ep: int = field(default=1, validator=ge(1))

    def plan(self, world: int | None) -> SamplePlan:
        """Arrange ``world`` ranks, or the smallest world that fits: ep."""
        world = self.ep if world is None else world
        if world % self.ep:
            fix = f"Start a multiple of {self.ep} ranks, or change ep."
            raise moefw.PlanError(f"{world} ranks cannot be split into groups of ep {self.ep}.", fix)
        return SamplePlan(world=world, ep=self.ep)

    def build(self, plan: moefw.LayoutPlan, device: str) -> moefw.Layout:
        """Open the process groups."""
        from moefw_sample.layout import SampleLayout

        assert isinstance(plan, SamplePlan)
        return SampleLayout(plan, device)


@moefw.hookimpl
def moefw_layouts() -> list[type[moefw.LayoutPlugin]]:
    """Declare the layout."""
    return [Sample]
