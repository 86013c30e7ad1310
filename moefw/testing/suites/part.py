"""What a plugin builds and offers, looked at before anything is computed with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any, ClassVar, Final

import pytest

from moefw.core.errors import PluginError, closest
from moefw.core.facts import ANY, Offers
from moefw.core.kinds import kind_of
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.base import Suite
from moefw.testing.suites.contract import misfits, unknown_offers
from moefw.testing.suites.runs import open_context
from moefw.testing.suites.watch import changed, held_by_modules

FIRST: Final = "test_its_methods_take_what_they_are_called_with"
"""The check without which no other one is of use."""

MECHANISMS: Final = ("keep", "recompute", "offload", "stash")
"""Mechanisms of built-in memory policies."""


class OfferChecks(Suite):
    """The check of what a plugin offers."""

    def test_its_offers_are_values_that_parts_may_need(self) -> None:
        """No part needs a misspelt value, and nothing else tells that the offer is of no use."""
        wrong = self._misspelt_offers()
        assert not wrong, wrong

    def _misspelt_offers(self) -> str:
        """Sentences about offers that no part can need; empty if there are none."""
        offered = self.offers()
        wrong = [*unknown_offers(offered), *_misspelt_mechanisms(offered)]
        return "\n".join(f"{self.plugin.name} {fault}" for fault in wrong)


class MethodChecks(OfferChecks):
    """Also the check of the methods of a plugin and of what it builds. The others run only if this one passes."""

    _faults: ClassVar[list[str] | None] = None
    """Sentences about the plugin, and about what it builds; None: not looked at yet."""

    def __init_subclass__(cls) -> None:
        """Look at each plugin anew."""
        super().__init_subclass__()
        cls._faults = None

    def offers(self, **settings: Any) -> Offers:
        """The plugin's offers in such a layer case; without settings, at a site without it, which no part refuses."""
        if settings:
            return super().offers(**settings)
        site = LayerCase(parts=self.parts).assemble().site.at(0)
        offered: Offers = self.part.offers(site)
        return offered

    def _misfits_of_built(self) -> list[str]:
        """Sentences about what the plugin builds. It may skip or fail a check, as any other does."""
        return []

    @pytest.fixture(autouse=True)
    def _moefw_methods(self, _moefw: None, request: pytest.FixtureRequest) -> None:
        """Fail a check that calls the plugin, or what it builds, in one line, if it cannot be called."""
        if hasattr(MethodChecks, request.function.__name__):
            return
        try:
            faults = self._all_faults()
        except (Exception, pytest.skip.Exception):
            return  # the checks say so themselves
        if faults:
            pytest.fail(f"{self.plugin.name}: nothing is checked before {FIRST} passes. See there.", pytrace=False)

    def test_its_methods_take_what_they_are_called_with(self) -> None:
        """Methods have the arguments of those of the kind: of the plugin, and of what it builds."""
        wrong = [f"{self.plugin.name}: {fault}" for fault in self._all_faults()]
        assert not wrong, "\n".join(wrong)

    def _all_faults(self) -> list[str]:
        """Sentences about the plugin; if there are none, about what it builds."""
        if self._faults is None:
            type(self)._faults = self._look()
        return self._faults or []

    def _look(self) -> list[str]:
        try:
            return misfits(self.part, kind_of(self.plugin).base) or self._misfits_of_built()
        except PluginError as error:
            return [str(error)]


class PartChecks(MethodChecks):
    """The checks of a plugin that builds a part of one layer."""

    @abstractmethod
    def _smallest_case(self) -> LayerCase:
        """Layer case for the layer of which a part is built. It may skip or fail a check, as any other does."""

    def offers(self, **settings: Any) -> Offers:
        """The plugin's offers in such a layer case; without settings, in the smallest one."""
        return self._offers_in(self.layer_case(**settings) if settings else self._smallest_case())

    def _misfits_of_built(self) -> list[str]:
        context, assembly = open_context(self._smallest_case())
        part = assembly.registry.built(self._declared(assembly), context)
        return misfits(part, resolve_name(str(kind_of(self.plugin).contract)))


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
