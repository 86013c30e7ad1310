"""A layer under memory policies: where each tensor that it saves waits between forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from attrs import frozen

from moefw.core.plugin import MemoryPlugin
from moefw.ledger.parts import LayerMemory, Placement, RankShape, Region, Tensor
from moefw.ledger.protocols import SaysPlacements


@frozen(kw_only=True)
class Wait:
    """A saved tensor: in which region it is saved first, and what becomes of its bytes.

    ``first`` is the number of the call that saves it first, ``since`` .. ``until`` are the calls in whose backward a
    tensor is there again that is dropped or was moved.
    """

    tensor: Tensor
    region: str
    first: int
    placement: Placement
    policy: MemoryPlugin | None = None
    """Whose placement it is; None: nobody's."""
    dropped: int = 0
    since: int = 0
    until: int = -1
    returned: bool = False
    """Whether it was dropped as what a region returns."""
    stays: bool = False
    """Whether it is there until the forward of the layer ends."""


@frozen(kw_only=True)
class Call:
    """One call of a region without others inside, in order. ``handed``: the bytes that its unit of weights is given."""

    region: str
    unit: str
    forward_bytes: int
    backward_bytes: int
    handed: int
    leaves_bytes: int
    weight_elements: int


@frozen(kw_only=True)
class Rerun:
    """The calls that a policy runs again, from ``start`` to ``last``, the last that saves something."""

    region: str
    start: int
    last: int


@frozen(kw_only=True)
class PlacedLayer:
    """A layer as it waits for its backward."""

    layer: LayerMemory
    waits: tuple[Wait, ...]
    calls: tuple[Call, ...]
    reruns: tuple[Rerun, ...]

    @property
    def kept(self) -> int:
        """The bytes that stay where they are."""
        return sum(wait.placement.kept for wait in self.waits)

    @property
    def offloaded(self) -> int:
        """The bytes that wait off the device."""
        return sum(wait.placement.offloaded for wait in self.waits)

    @property
    def stashed(self) -> int:
        """The bytes that wait in a policy's own memory."""
        return sum(wait.placement.stashed for wait in self.waits)


@dataclass(eq=False)
class _Scope:
    """A call of a region with a policy, and what is saved under it."""

    policy: MemoryPlugin
    start: int
    end: int = 0
    saved: dict[str, Tensor] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    last_use: int = -1
    last_save: int = -1
    moves_rows: bool = False


@dataclass(eq=False)
class _Found:
    """What happened to one tensor: who saved it, and under which policies."""

    tensor: Tensor
    region: str
    first: int
    kept: bool = False
    under: list[_Scope] = field(default_factory=list)
    made_again_by: _Scope | None = None


def place(layer: LayerMemory, policies: Mapping[str, MemoryPlugin], shape: RankShape) -> PlacedLayer:
    """Apply the policies of regions, by name. Of nested regions, the innermost treats what is saved in it."""
    walk = _Walk(policies, shape)
    walk.enter(layer.region, None, "", 0)
    return PlacedLayer(layer=layer, waits=tuple(walk.waits()), calls=tuple(walk.calls), reruns=tuple(walk.reruns))


@final
class _Walk:
    def __init__(self, policies: Mapping[str, MemoryPlugin], shape: RankShape) -> None:
        self.policies, self.shape = policies, shape
        self.calls: list[Call] = []
        self.reruns: list[Rerun] = []
        self._found: dict[str, _Found] = {}
        self._returned: dict[str, _Scope] = {}

    def enter(self, region: Region, around: _Scope | None, unit: str, handed: int) -> None:
        policy = self.policies.get(region.name)
        scope, unit = around, region.unit or unit
        handed = sum(tensor.nbytes for tensor in region.given) if region.unit else handed
        if policy is not None and not policy.passive:
            scope = _Scope(policy, start=len(self.calls))
            if policy.runs_again:
                for tensor in region.given:
                    self._save(tensor, region.name, around)
        inner = around if scope is not None and scope.policy.runs_again and region.moves_rows else scope
        for tensor in region.saves:
            self._save(tensor, region.name, inner)
        for tensor in region.holds:
            self._record(tensor, region.name).kept = True
        if not region.inside:
            self.calls.append(
                Call(
                    region=region.name,
                    unit=unit,
                    forward_bytes=region.forward_bytes,
                    backward_bytes=region.backward_bytes,
                    handed=handed,
                    leaves_bytes=region.leaves_bytes,
                    weight_elements=region.weight_elements,
                )
            )
        for inside in region.inside:
            self.enter(inside, scope, unit, handed)
        if scope is not None and scope is not around:
            self._leave(region, scope)

    def _leave(self, region: Region, scope: _Scope) -> None:
        scope.end = len(self.calls) - 1
        if scope.policy.runs_again:
            self._returned |= dict.fromkeys(region.returns, scope)
            scope.moves_rows = region.moves_rows
            if scope.saved:
                self.reruns.append(Rerun(region=region.name, start=scope.start, last=scope.last_save))
            return
        saved = list(scope.saved.values())
        said = scope.policy.placements(saved, self.shape) if isinstance(scope.policy, SaysPlacements) else None
        placements = said or [Placement(kept=tensor.nbytes) for tensor in saved]
        scope.placements = {tensor.name: placement for tensor, placement in zip(saved, placements, strict=True)}

    def _save(self, tensor: Tensor, region: str, scope: _Scope | None) -> None:
        found = self._record(tensor, region)
        maker = self._returned.get(tensor.name) or self._returned.get(tensor.stands_for or "")
        if maker is not None:
            maker.last_use = max(maker.last_use, len(self.calls))
            found.made_again_by = maker
        elif scope is None:
            found.kept = True
        else:
            scope.saved.setdefault(tensor.name, tensor)
            scope.last_save = len(self.calls)
            found.under.append(scope)

    def _record(self, tensor: Tensor, region: str) -> _Found:
        return self._found.setdefault(tensor.name, _Found(tensor, region, len(self.calls)))

    def waits(self) -> list[Wait]:
        return [_wait(found) for found in self._found.values()]


def _wait(found: _Found) -> Wait:
    tensor, region, first = found.tensor, found.region, found.first
    moved = [scope for scope in found.under if not scope.policy.runs_again]
    placements = [scope.placements[tensor.name] for scope in moved]
    if found.kept or any(placement.kept == tensor.nbytes for placement in placements):
        return Wait(tensor=tensor, region=region, first=first, placement=Placement(kept=tensor.nbytes))
    if placements:
        scope = moved[0]
        return Wait(
            tensor=tensor,
            region=region,
            first=first,
            placement=placements[0],
            policy=scope.policy,
            since=scope.start,
            until=scope.end,
        )
    maker = found.made_again_by or found.under[0]
    returned = found.made_again_by is not None
    return Wait(
        tensor=tensor,
        region=region,
        first=first,
        placement=Placement(),
        dropped=tensor.nbytes,
        since=maker.start,
        until=max(maker.last_use, first) if returned else maker.end,
        returned=returned,
        stays=returned and maker.moves_rows,
    )
