"""Memory policies of the optimizer that break their contract in one way each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

import moefw
from declared import NamedAfterItsClass, declarations
from moefw.core.plugin import OptimizerMemoryPolicyPlugin
from moefw.runtime.optimizer_states import OptimizerPolicy, OptimizerStates, StatePart


class PlainStates(OptimizerStates):
    """The states of ``inner`` as they are: right in every way."""

    def __init__(self, inner: OptimizerStates) -> None:
        self.inner, self.dtype = inner, inner.dtype

    def room(self, parameter: Tensor) -> Tensor:
        return self.inner.room(parameter)

    def update(self, parts: Sequence[StatePart]) -> None:
        self.inner.update(parts)
        for part in parts:
            self.change(part.parameter)

    def change(self, parameter: Tensor) -> None:
        """Change an updated parameter in place."""


class KnowsNoBoxes(PlainStates):
    def problems(self) -> Sequence[moefw.Problem]:  # type: ignore[override]
        return ()


class GoesFurther(PlainStates):
    def change(self, parameter: Tensor) -> None:
        parameter += 1.0


class CountsBesideTheStates(PlainStates):
    """Its steps get smaller by a count that no checkpoint has."""

    updates = 0

    def update(self, parts: Sequence[StatePart]) -> None:
        self.updates += 1
        super().update(parts)

    def change(self, parameter: Tensor) -> None:
        parameter += 1e-6 * self.updates


class Jitters(PlainStates):
    def change(self, parameter: Tensor) -> None:
        parameter += 1e-6 * torch.rand_like(parameter)


class KnowsTheWorld(PlainStates):
    def change(self, parameter: Tensor) -> None:
        parameter += 1e-6 * (dist.get_world_size() if dist.is_initialized() else 1)


class PlainPolicy(OptimizerPolicy):
    def __init__(self, made: type[PlainStates]) -> None:
        self.made = made

    def treat(self, states: OptimizerStates) -> OptimizerStates:
        return self.made(states)


@frozen
class _Plugin(NamedAfterItsClass, OptimizerMemoryPolicyPlugin):
    """A policy under test."""

    mechanism: ClassVar[str] = "bf16"
    made: ClassVar[type[PlainStates]] = PlainStates

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        return PlainPolicy(self.made)


class _OfActivations(moefw.MemoryPolicy):
    def wrap(self, region, function):
        return function


@frozen
class MisspellsItsOffer(_Plugin):
    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(replays=("allways",))


class _OfBoth(PlainPolicy):
    def wrap(self, region, function):
        return lambda *arguments: function(*arguments)


@frozen
class WrapsFunctions(_Plugin):
    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        return _OfBoth(self.made)


@frozen
class TreatsActivations(_Plugin):
    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        return _OfActivations()


@frozen
class AsksForNothing(_Plugin):
    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        return ()


PLUGINS = {plugin: plugin for plugin in _Plugin.__subclasses__()} | declarations(_Plugin, PlainStates)
"""The plugin of each policy, and of the states that it makes."""
