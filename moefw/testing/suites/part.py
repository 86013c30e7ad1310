"""What a plugin builds and offers, looked at before anything is computed with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any, ClassVar, Final

import pytest

from moefw.core.errors import MoefwError, PluginError, closest
from moefw.core.facts import ANY, Offers
from moefw.core.kinds import kind_of
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.base import Suite
from moefw.testing.suites.contract import misfits, unknown_offers
from moefw.testing.suites.runs import open_context
from moefw.testing.suites.watch import changed, held_by_modules

FIRST: Final = "test_it_builds_a_part_whose_methods_take_what_they_are_called_with"
"""The check without which no other one is of use."""

MECHANISMS: Final = ("keep", "recompute", "offload", "stash")
"""Mechanisms of built-in memory policies."""


class PartChecks(Suite):
    """Checks of the part of one layer. The other checks of a suite run only if the first of these passes."""

    _faults: ClassVar[list[str] | None] = None
    """Sentences about what is built, and its methods; None: not looked at yet."""

    def __init_subclass__(cls) -> None:
        """Look at the part of each plugin."""
        super().__init_subclass__()
        cls._faults = None

    @abstractmethod
    def _smallest_case(self) -> LayerCase:
        """Layer case for the layer of which a part is built. It may skip or fail a check, as any other does."""

    @pytest.fixture(autouse=True)
    def _moefw_part(self, _moefw: None, request: pytest.FixtureRequest) -> None:
        """Fail a check that runs the part, in one line, if it is none that it can call."""
        if request.function.__name__ in vars(PartChecks):
            return
        try:
            faults = self._faults_of_part()
        except (AssertionError, MoefwError, pytest.skip.Exception):
            return  # the checks say so themselves
        if faults:
            pytest.fail(f"{self.plugin.name}: nothing is checked before {FIRST} passes. See there.", pytrace=False)

    def test_it_builds_a_part_whose_methods_take_what_they_are_called_with(self) -> None:
        """``build`` returns a part of the kind. Its methods, and those of the plugin, have the arguments of theirs."""
        wrong = [f"{self.plugin.name}: {fault}" for fault in self._faults_of_part()]
        assert not wrong, "\n".join(wrong)

    def test_its_offers_are_values_that_parts_may_need(self) -> None:
        """No part needs a misspelt value, and nothing else tells that the offer is of no use."""
        assembly = self._smallest_case().assemble()
        offered = self._declared(assembly).offers(assembly.site.at(0))
        wrong = [*unknown_offers(offered), *_misspelt_mechanisms(offered)]
        assert not wrong, "\n".join(f"{self.plugin.name} {fault}" for fault in wrong)

    def _faults_of_part(self) -> list[str]:
        """Sentences about what is built, and about methods that cannot be called as they will be."""
        if self._faults is None:
            type(self)._faults = self._look()
        return self._faults or []

    def _look(self) -> list[str]:
        kind = kind_of(self.plugin)
        assert kind.contract is not None, f"nothing is built of {kind.one}"
        try:
            context, assembly = open_context(self._smallest_case())
            plugin = self._declared(assembly)
            wrong = misfits(plugin, kind.base)
            return wrong or misfits(assembly.registry.built(plugin, context), resolve_name(kind.contract))
        except PluginError as error:
            return [str(error)]

    def _declared(self, assembly: Any) -> Any:
        """The plugin with its options, as an assembly has it."""
        kind = kind_of(self.plugin)
        chosen = getattr(assembly.parts, kind.key)
        return chosen[0] if kind.many else chosen


def _misspelt_mechanisms(offered: Offers) -> Iterator[str]:
    """Yield what is wrong with regions that are offered for a word that is nearly a mechanism: others are free."""
    regions = offered.get("region", ())
    for region, mechanism in () if regions == ANY else regions:
        meant = closest(mechanism, MECHANISMS)
        if meant is not None and mechanism != meant:
            yield f"offers the region {region!r} for {mechanism!r}. Did you mean {meant!r}?"


class StatelessPartChecks(PartChecks):
    """Also the check of what modules keep, of a part that keeps nothing but what it declares."""

    @abstractmethod
    def _user(self) -> Callable[[int], object]:
        """Function that runs one part on values that are drawn from a seed, of the same shapes each time."""

    def test_the_modules_of_its_package_keep_nothing(self) -> None:
        """No number, tensor or container in a module or on a class changes from the second call on.

        The first call may compile kernels, or make tables of shapes.
        """
        use = self._user()
        use(1)
        before = held_by_modules(self.plugin)
        use(2)
        wrote = ", ".join(changed(before, held_by_modules(self.plugin)))
        assert not wrote, f"{self.plugin.name} writes {wrote} as it runs. Keep nothing of a call."
