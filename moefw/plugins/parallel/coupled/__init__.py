"""``coupled``: experts use attention's groups, without folded meshes; the baseline for ``folded``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, optional

import moefw
from moefw.core.plugin import LayoutPlugin
from moefw.core.records import Zero
from moefw.core.site import Site
from moefw.plugins.parallel.options import Sharing, fit_world, shards_validator, split_needs, zero_validator


@frozen(kw_only=True)
class Coupled(LayoutPlugin):
    """One mesh (pp, dp, cp, tp) whose groups the experts share: ep is inside dp, and etp is tp.

    An expert has dp / ep x cp copies, its edp.
    """

    name: ClassVar[str] = "coupled"

    pp: int = field(default=1, validator=ge(1))
    """Number of ranks that share the layers."""
    dp: int | None = field(default=None, validator=optional(ge(1)))
    """Number of ranks with different sequences; null: the size that the world leaves. ``ep`` divides it."""
    cp: int = field(default=1, validator=ge(1))
    """Number of ranks that share sequences."""
    tp: int = field(default=1, validator=ge(1))
    """Number of ranks that share matrices, of attention and of each expert."""
    ep: int = field(default=1, validator=ge(1))
    """Number of ranks that share the experts of a layer."""
    shard: int | Literal["all"] = field(default=1, validator=shards_validator)
    """Number of ranks that shard each parameter of attention (FSDP). It divides the number of copies, dp x cp.

    With 1, each copy is whole; ``all``: one copy in total.
    """
    expert_shard: int | Literal["all"] = field(default=1, validator=shards_validator)
    """Number of ranks that shard each parameter of the experts (FSDP). It divides the number of copies, edp.

    With 1, each copy is whole; ``all``: one copy in total.
    """
    zero: Zero = field(default=3, validator=zero_validator)
    """Stage of ZeRO of all parameters that ranks shard, those of experts included.

    3: weights are gathered for each pass through their unit, and gradients reduced after each micro-batch. 2: weights
    are gathered once a step, and held until the last backward. 1: so they are, and gradients of all micro-batches are
    added up whole, in fp32, and reduced once a step.
    """

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Needs: a model that can be split along the axes in use."""
        return split_needs({"pp": self.pp, "cp": self.cp, "tp": self.tp})

    def plan(self, world: int | None) -> moefw.MeshPlan:
        """Arrange ``world`` ranks, or the smallest world that fits: pp * ep*cp*tp, and enough copies to shard."""
        pp = self.pp
        cp = self.cp
        tp = self.tp
        ep = self.ep
        if self.dp and self.dp % ep:
            near = max(1, round(self.dp / ep)) * ep
            raise moefw.PlanError(f"ep {ep} does not divide dp {self.dp}.", f"Leave dp out, or use dp: {near}.")
        dense_sharing = Sharing(option="shard", asked=self.shard, copy_ranks=pp * tp, axes="dp x cp")
        expert_sharing = Sharing(
            option="expert_shard", asked=self.expert_shard, copy_ranks=pp * ep * tp, axes="dp / ep x cp"
        )
        along = f"dp {self.dp}" if self.dp else f"ep {ep}"
        world = fit_world(
            world,
            unit=pp * (self.dp or ep) * cp * tp,
            exactly=self.dp is not None,
            sizes=f"pp {pp} x {along} x cp {cp} x tp {tp}",
            sharings=(dense_sharing, expert_sharing),
        )
        dp = world // (pp * cp * tp)
        return moefw.MeshPlan(
            dense=moefw.Mesh((("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp))),
            experts=moefw.Mesh((("pp", pp), ("edp", dp // ep), ("ep", ep), ("edp", cp), ("etp", tp))),
            shards={"dense": dense_sharing.over(world), "experts": expert_sharing.over(world)},
            zeros={"dense": self.zero, "experts": self.zero},
        )


@moefw.hookimpl
def moefw_layouts() -> list[type[LayoutPlugin]]:
    """Declare the layout."""
    return [Coupled]
