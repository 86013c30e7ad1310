"""``folded``: attention and experts each in their own mesh over the same ranks (arXiv 2504.14960)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, optional

import moefw
from moefw.core.plugin import LayoutPlugin
from moefw.core.records import Zero
from moefw.core.site import Site
from moefw.plugins.parallel.options import Sharing, fit_world, shards_validator, split_needs, zero_validator


def _each_axis_once(_: object, option: Any, order: tuple[str, ...]) -> None:
    """Raise ValueError unless ``order`` names each axis of the mesh once. An attrs validator."""
    axes: tuple[str, ...] = option.default
    wrong = [f"{axis} is missing" for axis in axes if axis not in order]
    wrong += [f"{axis} stands there {order.count(axis)} times" for axis in axes if order.count(axis) > 1]
    wrong += [f"{axis} is not one of its axes" for axis in dict.fromkeys(order) if axis not in axes]
    if wrong:
        raise ValueError(f"this is no order of a mesh: {', '.join(wrong)}. Name each of {', '.join(axes)} once.")


def _etp_inside_ep(_: object, option: Any, order: tuple[str, ...]) -> None:
    """Raise ValueError unless etp is inside ep. An attrs validator."""
    if order.index("etp") < order.index("ep"):
        raise ValueError(
            "etp stands before ep, and dispatch libraries (DeepEP, HybridEP) number the experts of a group by "
            "consecutive ranks. Name etp after ep."
        )


@frozen(kw_only=True)
class DenseMesh:
    """Split of attention, embedding and loss."""

    dp: int | None = field(default=None, validator=optional(ge(1)))
    """Number of ranks with different sequences; null: the size that the world leaves."""
    cp: int = field(default=1, validator=ge(1))
    """Number of ranks that share sequences."""
    tp: int = field(default=1, validator=ge(1))
    """Number of ranks that share matrices."""
    order: tuple[Literal["dp", "cp", "tp"], ...] = field(default=("dp", "cp", "tp"), validator=_each_axis_once)
    """Axes of the mesh in a pipeline stage, outermost first; the last one joins neighbouring ranks."""
    shard: int | Literal["all"] = field(default=1, validator=shards_validator)
    """Number of ranks that shard each parameter of the mesh (FSDP). It divides the number of copies, dp x cp.

    With 1, each copy is whole; ``all``: one copy in total.
    """
    zero: Zero = field(default=3, validator=zero_validator)
    """Stage of ZeRO, where ranks shard parameters.

    3: weights are gathered for each pass through their unit, and gradients reduced after each micro-batch. 2: weights
    are gathered once a step, and held until the last backward. 1: so they are, and gradients of all micro-batches are
    added up whole, in fp32, and reduced once a step.
    """


@frozen(kw_only=True)
class ExpertMesh:
    """Split of experts. ``edp`` is the size that the world leaves."""

    ep: int = field(default=1, validator=ge(1))
    """Number of ranks that share the experts of a layer."""
    etp: int = field(default=1, validator=ge(1))
    """Number of ranks that share the matrices of each expert."""
    order: tuple[Literal["edp", "ep", "etp"], ...] = field(
        default=("edp", "ep", "etp"), validator=[_each_axis_once, _etp_inside_ep]
    )
    """Axes of the mesh in a pipeline stage, outermost first, ``etp`` after ``ep``.

    The last one joins neighbouring ranks.
    """
    shard: int | Literal["all"] = field(default=1, validator=shards_validator)
    """Number of ranks that shard each parameter of the mesh (FSDP). It divides the number of copies, edp.

    With 1, each copy is whole; ``all``: one copy in total.
    """
    zero: Zero = field(default=3, validator=zero_validator)
    """Stage of ZeRO, where ranks shard parameters.

    3: weights are gathered for each pass through their unit, and gradients reduced after each micro-batch. 2: weights
    are gathered once a step, and held until the last backward. 1: so they are, and gradients of all micro-batches are
    added up whole, in fp32, and reduced once a step.
    """


@frozen(kw_only=True)
class Folded(LayoutPlugin):
    """Two meshes over the same ranks: dense (pp, dp, cp, tp) and experts (pp, edp, ep, etp)."""

    name: ClassVar[str] = "folded"

    pp: int = field(default=1, validator=ge(1))
    """Number of ranks that share the layers."""
    dense: DenseMesh = DenseMesh()
    """Mesh of attention, embedding and loss."""
    experts: ExpertMesh = ExpertMesh()
    """Mesh of the experts."""

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Needs: a model that can be split along the axes in use."""
        return split_needs({"pp": self.pp, "dense.cp": self.dense.cp, "dense.tp": self.dense.tp})

    def plan(self, world: int | None) -> moefw.MeshPlan:
        """Arrange ``world`` ranks, or the smallest world that fits: pp * lcm(dp*cp*tp, ep*etp), and copies to shard."""
        dense = self.dense
        experts = self.experts
        # The ranks of a pipeline stage are a multiple of those of both meshes; ``dp`` and ``edp`` follow from it.
        dense_ranks = (dense.dp or 1) * dense.cp * dense.tp
        expert_ranks = experts.ep * experts.etp
        smallest_stage = math.lcm(dense_ranks, expert_ranks)
        if dense.dp and smallest_stage != dense_ranks:
            fitting_dp = smallest_stage // dense.cp // dense.tp
            raise moefw.PlanError(
                f"ep {experts.ep} x etp {experts.etp} = {expert_ranks} does not divide dp x cp x tp = {dense_ranks}.",
                f"Leave dense.dp out, or use dense.dp: {fitting_dp}.",
            )
        dense_sharing = Sharing(option="dense.shard", asked=dense.shard, copy_ranks=self.pp * dense.tp, axes="dp x cp")
        expert_sharing = Sharing(
            option="experts.shard", asked=experts.shard, copy_ranks=self.pp * expert_ranks, axes="edp"
        )
        world = fit_world(
            world,
            unit=self.pp * smallest_stage,
            exactly=dense.dp is not None,
            sizes=f"pp {self.pp} x lcm(dp x cp x tp = {dense_ranks}, ep x etp = {expert_ranks})",
            sharings=(dense_sharing, expert_sharing),
        )
        stage = world // self.pp
        sizes = {"dp": stage // (dense.cp * dense.tp), "cp": dense.cp, "tp": dense.tp}
        sizes |= {"edp": stage // expert_ranks, "ep": experts.ep, "etp": experts.etp}
        return moefw.MeshPlan(
            dense=moefw.Mesh((("pp", self.pp), *((axis, sizes[axis]) for axis in dense.order))),
            experts=moefw.Mesh((("pp", self.pp), *((axis, sizes[axis]) for axis in experts.order))),
            shards={"dense": dense_sharing.over(world), "experts": expert_sharing.over(world)},
            zeros={"dense": dense.zero, "experts": experts.zero},
        )


@moefw.hookimpl
def moefw_layouts() -> list[type[LayoutPlugin]]:
    """Declare the layout."""
    return [Folded]
