"""``folded``: attention and experts each in their own mesh over the same ranks (arXiv 2504.14960)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import ge, optional

import moefw
from moefw.core.plugin import LayoutPlugin
from moefw.core.site import Site
from moefw.plugins.parallel.folded.meshes import FoldedPlan


@frozen(kw_only=True)
class DenseMesh:
    """How attention, embedding and loss are split. ``dp`` null: whatever the world leaves."""

    dp: int | None = field(default=None, validator=optional(ge(1)))
    cp: int = field(default=1, validator=ge(1))
    tp: int = field(default=1, validator=ge(1))


@frozen(kw_only=True)
class ExpertMesh:
    """How experts are split; what the world leaves over is ``edp``."""

    ep: int = field(default=1, validator=ge(1))
    etp: int = field(default=1, validator=ge(1))


@frozen(kw_only=True)
class Folded(LayoutPlugin):
    """Two meshes over the same ranks: dense (pp, dp, cp, tp) and experts (pp, edp, ep, etp).

    ``ranks_per_node``: so many neighbouring ranks share a fast link; null: those of one machine, as the launcher says.
    """

    name: ClassVar[str] = "folded"

    pp: int = field(default=1, validator=ge(1))
    dense: DenseMesh = DenseMesh()
    experts: ExpertMesh = ExpertMesh()
    ranks_per_node: int | None = field(default=None, validator=optional(ge(1)))

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Data and expert parallelism are built so far, and experts in parts."""
        sizes = {"pp": self.pp, "dense.cp": self.dense.cp, "dense.tp": self.dense.tp}
        return [
            moefw.Problem(
                f"{option} {size}: this version trains with dp, ep and etp only.", f"Use {option}: 1.", option
            )
            for option, size in sizes.items()
            if size > 1
        ]

    def plan(self, world: int | None) -> FoldedPlan:
        """Arrange ``world`` ranks, or the smallest world that fits: pp * lcm(dp*cp*tp, ep*etp)."""
        dense, experts = self.dense, self.experts
        fixed, spread = (dense.dp or 1) * dense.cp * dense.tp, experts.ep * experts.etp
        stage = math.lcm(fixed, spread)
        if dense.dp and stage != fixed:
            what = f"ep {experts.ep} x etp {experts.etp} = {spread} does not divide dp x cp x tp = {fixed}."
            raise moefw.PlanError(what, f"Leave dense.dp out, or use dense.dp: {stage // dense.cp // dense.tp}.")
        smallest = self.pp * stage
        world = smallest if world is None else world
        if world < smallest or world % smallest or (dense.dp and world > smallest):
            wanted = f"exactly {smallest}" if dense.dp else f"a multiple of {smallest}"
            sizes = f"pp {self.pp} x lcm(dp x cp x tp = {fixed}, ep x etp = {spread})"
            near = smallest if dense.dp else max(1, round(world / smallest)) * smallest
            what = f"{world} ranks do not fit this layout, which wants {wanted} = {sizes}."
            raise moefw.PlanError(what, f"Start {near} ranks, or change the sizes.")
        stage = world // self.pp
        return FoldedPlan(
            pp=self.pp,
            dp=stage // (dense.cp * dense.tp),
            cp=dense.cp,
            tp=dense.tp,
            edp=stage // spread,
            ep=experts.ep,
            etp=experts.etp,
        )

    def build(self, plan: moefw.LayoutPlan, device: str) -> moefw.Layout:
        """Open the process groups."""
        from moefw.plugins.parallel.folded.layout import FoldedLayout

        assert isinstance(plan, FoldedPlan)
        return FoldedLayout(plan, device, self.ranks_per_node)


@moefw.hookimpl
def moefw_layouts() -> list[type[LayoutPlugin]]:
    """Declare the layout."""
    return [Folded]
