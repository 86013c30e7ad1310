"""What all contract suites share: which plugin is held to its promises, how hard, and on which ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import pytest
from attrs import frozen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moefw.core.facts import Offers
from moefw.core.plugin import Plugin
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool


@frozen
class Profile:
    """How hard a suite looks: on worlds of so many ranks, with so many drawn examples a check."""

    worlds: tuple[int, ...]
    examples: int


PROFILES: Final[Mapping[str, Profile]] = {
    "quick": Profile(worlds=(1, 2, 4), examples=12),
    "ci": Profile(worlds=(1, 2, 4), examples=60),
    "nightly": Profile(worlds=(1, 2, 4, 8), examples=600),
}


class Suite:
    """Holds one plugin to its contract. A subclass named ``Test...`` that sets ``plugin`` is all that pytest needs.

    ``options`` is what a spec would say beside ``use:``. What the plugin offers decides what is checked: a promise that
    is not kept fails, one that is not made skips with the reason. ``parts`` fills the other sections of the spec.
    ``repeats`` False: the part is right, and does not give the same bits in two runs (it adds up by atomics, say).
    """

    section: ClassVar[str]
    """The section of a spec that chooses this kind of plugin."""
    plugin: ClassVar[type[Plugin]]
    options: ClassVar[Mapping[str, Any]] = {}
    parts: ClassVar[Mapping[str, Any]] = {}
    repeats: ClassVar[bool] = True

    pool: RankPool
    profile: Profile

    @pytest.fixture(autouse=True)
    def _moefw(self, moefw_pool: RankPool, moefw_profile: Profile) -> None:
        self.pool, self.profile = moefw_pool, moefw_profile

    @property
    def chosen(self) -> dict[str, Any]:
        """The choice of the plugin, as a spec writes it."""
        return {"use": self.plugin.name, **self.options}

    def layer_case(self, **settings: Any) -> LayerCase:
        """Return a layer case with the plugin in its place; ``parts`` given here go before those of the class."""
        parts = {**self.parts, **settings.pop("parts", {}), self.section: self.chosen}
        return LayerCase(parts=parts, plugins=(self.plugin,), **settings)

    def offers(self, **settings: Any) -> Offers:
        """Return what the plugin promises where it stands in such a layer case."""
        assembly = self.layer_case(**settings).assemble()
        offered: Offers = getattr(assembly.parts, self.section).offers(assembly.site.at(0))
        return offered

    def promised(self, fact: str, **settings: Any) -> Any:
        """Return what the plugin offers of a fact; skips the check where it offers nothing."""
        value = self.offers(**settings).get(fact)
        if not value:
            pytest.skip(f"{self.plugin.name} does not offer {fact}")
        return value

    def must_repeat(self) -> None:
        """Skip the check where the part does not repeat itself."""
        if not self.repeats:
            pytest.skip(f"{self.plugin.name} does not give the same bits in two runs, as the suite is told")

    def for_all(self, check: Callable[[Any], None], examples: st.SearchStrategy[Any], *, shrink: bool = True) -> None:
        """Run ``check`` on drawn examples, as many as the profile says; the smallest that fails is reported.

        ``shrink`` False reports the first that fails: the smallest takes a hundred more, much where ranks are started.
        """

        def run(example: Any) -> None:
            check(example)

        chosen = settings(
            max_examples=self.profile.examples,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            derandomize=bool(os.environ.get("CI")),
            suppress_health_check=list(HealthCheck),
        )
        given(examples)(chosen(run))()
