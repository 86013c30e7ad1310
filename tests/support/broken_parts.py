"""Memory policies and layouts that break their contract in one way each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moefw
from moefw.core.plugin import MemoryPlugin
from moefw.core.records import Side
from moefw.core.stages import Routing
from moefw.plugins.parallel.folded import Folded
from moefw.runtime.layer import MoELayer
from moefw.runtime.parallel.meshes import Mesh, MeshPlan
from moefw.runtime.parallel.opened_layout import OpenedLayout


@frozen
class _Policy(MemoryPlugin, moefw.MemoryPolicy):
    """A plugin that is its own runtime part."""

    mechanism: ClassVar[str] = "recompute"

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        return self

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self.run, region, function)

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@frozen
class RunsTwice(_Policy):
    name: ClassVar[str] = "runs-twice"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            function(*args, **kwargs)
        return super().run(region, function, *args, **kwargs)


@frozen
class RunsTwiceInBackward(_Policy):
    name: ClassVar[str] = "runs-twice-in-backward"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runs = []

        def twice(*args: Any, **kwargs: Any) -> Any:
            if runs:
                with torch.no_grad():
                    function(*args, **kwargs)
            runs.append(region)
            return function(*args, **kwargs)

        return super().run(region, twice, *args, **kwargs)


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.bfloat16().to(grad.dtype)


@frozen
class KeepsGradientsInHalf(_Policy):
    name: ClassVar[str] = "keeps-gradients-in-half"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().run(region, function, *map(_halved, args), **kwargs)


def _halved(value: Any) -> Any:
    return _Halve.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


@frozen
class LosesStructures(_Policy):
    """Detaches tensors inside a structure, as a reentrant checkpoint does."""

    name: ClassVar[str] = "loses-structures"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(value if isinstance(value, Tensor) else _detached(value) for value in args)
        return super().run(region, function, *args, **kwargs)


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, value)


@frozen
class ForgetsKeywords(_Policy):
    name: ClassVar[str] = "forgets-keywords"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().run(region, function, *args)


class _Rounded(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.bfloat16() if tensor.dtype == torch.float32 else tensor, self.back)

    def back(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@frozen
class SavesInHalf(_Policy):
    name: ClassVar[str] = "saves-in-half"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Rounded():
            return function(*args, **kwargs)


@frozen
class Half(SavesInHalf):
    """Correct: it says what it loses."""

    name: ClassVar[str] = "half"
    rtol: ClassVar[float] = 0.02

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(rtol=self.rtol)


@frozen
class LosesMoreThanItSays(Half):
    name: ClassVar[str] = "loses-more-than-it-says"
    rtol: ClassVar[float] = 1e-5


@frozen
class LosesInForward(Half):
    name: ClassVar[str] = "loses-in-forward"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return out + 1e-3 * out.detach() if isinstance(out, Tensor) else out


def _half_if_large(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype == torch.float32 and tensor.numel() > 4096 else tensor


@frozen
class SavesLargeTensorsInHalf(_Policy):
    name: ClassVar[str] = "saves-large-tensors-in-half"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_half_if_large, lambda saved: saved.float()):
            return function(*args, **kwargs)


@frozen
class NeedsElements(_Policy):
    name: ClassVar[str] = "needs-elements"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
            return tensor, tensor.max()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0]):
            return function(*args, **kwargs)


_LATEST: dict[str, Callable[..., Any]] = {}


@frozen
class KeepsOneFunction(_Policy):
    name: ClassVar[str] = "keeps-one-function"

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        _LATEST[region] = function
        return lambda *args, **kwargs: self.run(region, _LATEST[region], *args, **kwargs)


@frozen
class AttachesAgain(_Policy):
    """Lets gradients flow through the first forward as well as the second."""

    name: ClassVar[str] = "attaches-again"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = function(*args, **kwargs)
        if region != "router" or not torch.is_grad_enabled():
            return first
        second = function(*args, **kwargs)
        weights_TK = first.weights_TK + (second.weights_TK - second.weights_TK.detach())
        return Routing(
            expert_ids_TK=first.expert_ids_TK,
            weights_TK=weights_TK,
            scores_TE=first.scores_TE,
            stats=first.stats,
            aux_losses=first.aux_losses,
        )


@frozen
class AcceptsAnything(_Policy):
    name: ClassVar[str] = "accepts-anything"

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        return ()


@frozen
class PlansAgain(_Policy):
    """Exchanges metadata once more with each run of a router, like a region that extends too far."""

    name: ClassVar[str] = "plans-again"

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().run(region, function, *args, **kwargs)
        for layer in (thing for thing in gc.get_objects() if isinstance(thing, MoELayer)):
            if layer.router is getattr(function, "__self__", None):
                layer.dispatcher.plan(result)
        return result


@frozen(kw_only=True)
class _Layout(Folded):
    """The built-in layout with another plan."""

    kind: ClassVar[type[MeshPlan]] = MeshPlan

    def plan(self, world: int | None) -> MeshPlan:
        plan = super().plan(world)
        return self.kind(dense=plan.dense, experts=plan.experts, shards=plan.shards)


class _OverlappingPlan(MeshPlan):
    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        group = super().group(rank, axes)
        return tuple(sorted((rank + step) % self.world for step in range(len(group))))


@frozen(kw_only=True)
class Overlapping(_Layout):
    name: ClassVar[str] = "overlapping"
    kind = _OverlappingPlan


class _BackwardsPlan(MeshPlan):
    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        return super().group(rank, axes)[::-1]


@frozen(kw_only=True)
class Backwards(_Layout):
    name: ClassVar[str] = "backwards"
    kind = _BackwardsPlan


class _MiscountedPlan(MeshPlan):
    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "edp": super().sizes["dp"]}


@frozen(kw_only=True)
class Miscounted(_Layout):
    name: ClassVar[str] = "miscounted"
    kind = _MiscountedPlan


class _CrowdedPlan(MeshPlan):
    def coordinates(self, rank: int) -> Mapping[str, int]:
        return {**super().coordinates(rank), "ep": 0}


@frozen(kw_only=True)
class Crowded(_Layout):
    name: ClassVar[str] = "crowded"
    kind = _CrowdedPlan


class _TransposedPlan(MeshPlan):
    """Coordinates as if ep were innermost, groups as if etp were innermost."""

    def coordinates(self, rank: int) -> Mapping[str, int]:
        place = super().coordinates(rank)
        ep, etp = self.sizes["ep"], self.sizes["etp"]
        inner = place["ep"] * etp + place["etp"]
        return {**place, "ep": inner % ep, "etp": inner // ep}


@frozen(kw_only=True)
class Transposed(_Layout):
    name: ClassVar[str] = "transposed"
    kind = _TransposedPlan


@frozen(kw_only=True)
class Curt(_Layout):
    name: ClassVar[str] = "curt"

    def plan(self, world: int | None) -> MeshPlan:
        try:
            return super().plan(world)
        except moefw.PlanError as error:
            raise ValueError("no") from error


@frozen(kw_only=True)
class Wasteful(_Layout):
    """Arranges a part of a world that does not fit."""

    name: ClassVar[str] = "wasteful"

    def plan(self, world: int | None) -> MeshPlan:
        smallest = super().plan(None).world
        return super().plan(None if world is None else max(1, world // smallest) * smallest)


class _SlowPlan(MeshPlan):
    def coordinates(self, rank: int) -> Mapping[str, int]:
        until = time.process_time() + 5e-4
        while time.process_time() < until:
            pass
        return super().coordinates(rank)


@frozen(kw_only=True)
class Slow(_Layout):
    name: ClassVar[str] = "slow"
    kind = _SlowPlan


@frozen(kw_only=True)
class Scattered(_Layout):
    """The parts of an expert are far from each other: etp outside ep."""

    name: ClassVar[str] = "scattered"

    def plan(self, world: int | None) -> MeshPlan:
        plan = super().plan(world)
        places = tuple(sorted(plan.experts.places, key=lambda place: ["pp", "edp", "etp", "ep"].index(place[0])))
        return MeshPlan(dense=plan.dense, experts=Mesh(places), shards=plan.shards)


class _UnevenPlan(MeshPlan):
    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        first, *others = (one for row in super().copies(rank, side) for one in row)
        return ((first,), tuple(others)) if len(others) != 1 else ((first, *others),)


@frozen(kw_only=True)
class Uneven(_Layout):
    name: ClassVar[str] = "uneven"
    kind = _UnevenPlan


class _ForgetfulPlan(MeshPlan):
    """Plan as if only this rank's row held its parameters."""

    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        return tuple(row for row in super().copies(rank, side) if rank in row)


@frozen(kw_only=True)
class Forgetful(_Layout):
    name: ClassVar[str] = "forgetful"
    kind = _ForgetfulPlan


class _SelfishPlan(MeshPlan):
    """Plan in which every rank's own row comes first."""

    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        return tuple(sorted(super().copies(rank, side), key=lambda row: rank not in row))


@frozen(kw_only=True)
class Selfish(_Layout):
    name: ClassVar[str] = "selfish"
    kind = _SelfishPlan


class _BackwardRowsPlan(MeshPlan):
    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        return tuple(row[::-1] for row in super().copies(rank, side))


@frozen(kw_only=True)
class BackwardRows(_Layout):
    name: ClassVar[str] = "backward-rows"
    kind = _BackwardRowsPlan


class _BackwardCopiesPlan(MeshPlan):
    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        return super().copies(rank, side)[::-1]


@frozen(kw_only=True)
class BackwardCopies(_Layout):
    name: ClassVar[str] = "backward-copies"
    kind = _BackwardCopiesPlan


class _WastefulLayout(OpenedLayout):
    def open(self, ranks: tuple[int, ...]) -> Any:
        self._opened.clear()
        return super().open(ranks)


@frozen(kw_only=True)
class OpensAgain(_Layout):
    name: ClassVar[str] = "opens-again"

    def build(self, plan: moefw.LayoutPlan, device: str) -> moefw.Layout:
        return _WastefulLayout(plan, device, self.ranks_per_node)


class _StrangeLayout(OpenedLayout):
    def group(self, *axes: str) -> Any:
        return super().group("dp", "cp", "tp") if axes == ("ep",) else super().group(*axes)


@frozen(kw_only=True)
class OpensOthers(_Layout):
    name: ClassVar[str] = "opens-others"

    def build(self, plan: moefw.LayoutPlan, device: str) -> moefw.Layout:
        return _StrangeLayout(plan, device, self.ranks_per_node)


@frozen(kw_only=True)
class HasNoNodes(_Layout):
    name: ClassVar[str] = "has-no-nodes"

    def build(self, plan: moefw.LayoutPlan, device: str) -> moefw.Layout:
        layout = OpenedLayout(plan, device)
        layout.ranks_per_node = 0
        return layout
