"""Layouts that break their contract in one way each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

import moefw
from declared import NamedAfterItsClass, declarations
from moefw.core.records import Side
from moefw.plugins.parallel.folded import Folded
from moefw.runtime.parallel.meshes import Mesh, MeshPlan
from moefw.runtime.parallel.opened_layout import OpenedLayout


class PlainPlan(MeshPlan):
    """Right in every way."""


@frozen(kw_only=True)
class _Layout(NamedAfterItsClass, Folded):
    """The built-in layout with another plan."""

    made: ClassVar[type[MeshPlan]] = PlainPlan

    def plan(self, world: int | None) -> MeshPlan:
        plan = super().plan(world)
        return self.made(dense=plan.dense, experts=plan.experts, shards=plan.shards)


class KnowsNoSide(PlainPlan):
    def copies(self, rank: int) -> tuple[tuple[int, ...], ...]:  # type: ignore[override]
        return super().copies(rank, "dense")


@frozen(kw_only=True)
class MisspellsItsOffer(_Layout):
    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(rows=("raged",))


class CountsRanksOfExpertsBackwards(PlainPlan):
    def coordinates(self, rank: int) -> Mapping[str, int]:
        place = super().coordinates(rank)
        return {**place, "ep": self.sizes["ep"] - 1 - place["ep"]}


class Overlapping(PlainPlan):
    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        group = super().group(rank, axes)
        return tuple(sorted((rank + step) % self.world for step in range(len(group))))


class Backwards(PlainPlan):
    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        return super().group(rank, axes)[::-1]


class Miscounted(PlainPlan):
    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "edp": super().sizes["dp"]}


class Crowded(PlainPlan):
    def coordinates(self, rank: int) -> Mapping[str, int]:
        return {**super().coordinates(rank), "ep": 0}


class Transposed(PlainPlan):
    """Coordinates as if ep were innermost, groups as if etp were innermost."""

    def coordinates(self, rank: int) -> Mapping[str, int]:
        place = super().coordinates(rank)
        ep, etp = self.sizes["ep"], self.sizes["etp"]
        inner = place["ep"] * etp + place["etp"]
        return {**place, "ep": inner % ep, "etp": inner // ep}


@frozen(kw_only=True)
class Curt(_Layout):
    def plan(self, world: int | None) -> MeshPlan:
        try:
            return super().plan(world)
        except moefw.PlanError as error:
            raise ValueError("no") from error


@frozen(kw_only=True)
class ShardsMoreThanThereIs(_Layout):
    def plan(self, world: int | None) -> MeshPlan:
        plan = super().plan(world)
        return MeshPlan(dense=plan.dense, experts=plan.experts, shards={**plan.shards, "experts": 7})


@frozen(kw_only=True)
class Wasteful(_Layout):
    """Arranges a part of a world that does not fit."""

    def plan(self, world: int | None) -> MeshPlan:
        smallest = super().plan(None).world
        return super().plan(None if world is None else max(1, world // smallest) * smallest)


class Slow(PlainPlan):
    def coordinates(self, rank: int) -> Mapping[str, int]:
        until = time.process_time() + 5e-4
        while time.process_time() < until:
            pass
        return super().coordinates(rank)


@frozen(kw_only=True)
class Scattered(_Layout):
    """The parts of an expert are far from each other: etp outside ep."""

    def plan(self, world: int | None) -> MeshPlan:
        plan = super().plan(world)
        places = tuple(sorted(plan.experts.places, key=lambda place: ["pp", "edp", "etp", "ep"].index(place[0])))
        return MeshPlan(dense=plan.dense, experts=Mesh(places), shards=plan.shards)


class Uneven(PlainPlan):
    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        first, *others = (one for row in super().copies(rank, side) for one in row)
        return ((first,), tuple(others)) if len(others) != 1 else ((first, *others),)


class Forgetful(PlainPlan):
    """Plan as if only this rank's row held its parameters."""

    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        return tuple(row for row in super().copies(rank, side) if rank in row)


class Selfish(PlainPlan):
    """Plan in which every rank's own row comes first."""

    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        return tuple(sorted(super().copies(rank, side), key=lambda row: rank not in row))


class BackwardRows(PlainPlan):
    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        return tuple(row[::-1] for row in super().copies(rank, side))


class BackwardCopies(PlainPlan):
    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        return super().copies(rank, side)[::-1]


class Unsharded(PlainPlan):
    """Plan that means by stage 0 that nothing is sharded."""

    def zero(self, side: Side) -> Any:
        return 0


class _WastefulLayout(OpenedLayout):
    def open(self, ranks: tuple[int, ...]) -> Any:
        self._opened.clear()
        return super().open(ranks)


class _LayoutWithATimeout(OpenedLayout):
    def open(self, ranks: tuple[int, ...], timeout_s: float) -> Any:  # type: ignore[override]
        return super().open(ranks)


@frozen(kw_only=True)
class OpensWithATimeout(_Layout):
    def build(self, plan: moefw.LayoutPlan, device: str) -> moefw.Layout:
        return _LayoutWithATimeout(plan, device, self.ranks_per_node)


@frozen(kw_only=True)
class OpensAgain(_Layout):
    def build(self, plan: moefw.LayoutPlan, device: str) -> moefw.Layout:
        return _WastefulLayout(plan, device, self.ranks_per_node)


class _StrangeLayout(OpenedLayout):
    def group(self, *axes: str) -> Any:
        return super().group("dp", "cp", "tp") if axes == ("ep",) else super().group(*axes)


@frozen(kw_only=True)
class OpensOthers(_Layout):
    def build(self, plan: moefw.LayoutPlan, device: str) -> moefw.Layout:
        return _StrangeLayout(plan, device, self.ranks_per_node)


@frozen(kw_only=True)
class HasNoNodes(_Layout):
    def build(self, plan: moefw.LayoutPlan, device: str) -> moefw.Layout:
        layout = OpenedLayout(plan, device)
        layout.ranks_per_node = 0
        return layout


PLUGINS = {layout: layout for layout in _Layout.__subclasses__()} | declarations(_Layout, PlainPlan)
"""The plugin of each layout, and of each plan."""
