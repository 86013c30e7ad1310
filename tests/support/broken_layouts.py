"""Layouts that break their contract in one way each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

import moefw
from moefw.core.records import Side
from moefw.plugins.parallel.folded import Folded
from moefw.runtime.parallel.meshes import Mesh, MeshPlan
from moefw.runtime.parallel.opened_layout import OpenedLayout


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
