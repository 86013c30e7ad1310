"""Base class of all contract suites: the plugin under test, the profile and the pool of ranks.

In every check, ``says`` begins the sentence of an assertion that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moefw.compose.assembly import Assembly
from moefw.compose.spec.source import Marks
from moefw.compose.spec.structure import structure
from moefw.core.errors import Problem
from moefw.core.facts import Offers
from moefw.core.kinds import kind_of
from moefw.core.plugin import Plugin
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.profiles import Profile


class Suite:
    """Tests one plugin against its contract. pytest only needs a subclass named ``Test...`` that sets ``plugin``.

    The plugin's offers decide what is checked: a promise that is not kept fails, one that is not made skips with the
    reason. The attributes with a text are settings of a subclass; ``moefw plugins --suites`` lists them.
    """

    plugin: ClassVar[type[Plugin]]
    """The plugin under test: a class."""
    options: ClassVar[Mapping[str, Any]] = {}
    """The plugin's options, the keys next to ``use:`` in a spec."""
    parts: ClassVar[Mapping[str, Any]] = {}
    """Other sections of the spec: ``{"gemm": {"use": "loop"}}``."""
    repeats: ClassVar[bool] = True
    """False: the part is correct, but two runs do not give the same bits, because of atomics, for example."""

    pool: RankPool
    profile: Profile

    @pytest.fixture(autouse=True)
    def _moefw(self, moefw_pool: RankPool, moefw_profile: Profile) -> None:
        self.pool = moefw_pool
        self.profile = moefw_profile

    @property
    def section(self) -> str:
        """The section of a spec that chooses this kind of plugin."""
        return kind_of(self.plugin).section

    @property
    def part(self) -> Any:
        """The plugin with its options."""
        return self.read({name: value for name, value in self.chosen.items() if name != "use"})

    def read(self, options: Mapping[str, Any]) -> Any:
        """The plugin with some options, which are read as from a spec."""
        problems: list[Problem] = []
        part: Any = structure(self.plugin, dict(options), (), Marks("suite"), problems)
        assert not problems, f"{self.plugin.name}: the options {options} do not read: {problems[0]}"
        return part

    @property
    def chosen(self) -> dict[str, Any]:
        """The choice of the plugin, as in a spec."""
        return {"use": self.plugin.name, **self.options}

    def layer_case(self, **settings: Any) -> LayerCase:
        """Layer case with the plugin; ``parts`` given here override those of the class."""
        parts = {**self.parts, **settings.pop("parts", {}), **kind_of(self.plugin).spec(self.chosen)}
        return LayerCase(parts=parts, plugins=(self.plugin,), **settings)

    def offers(self, **settings: Any) -> Offers:
        """The plugin's offers in such a layer case."""
        return self._offers_in(self.layer_case(**settings))

    def _offers_in(self, layer_case: LayerCase) -> Offers:
        """The plugin's offers in a layer case."""
        assembly = layer_case.assemble()
        offered: Offers = self._declared(assembly).offers(assembly.site.at(0))
        return offered

    def _declared(self, assembly: Assembly) -> Any:
        """The plugin with its options, as an assembly has it."""
        kind = kind_of(self.plugin)
        chosen = getattr(assembly.parts, kind.key)
        return chosen[0] if kind.many else chosen

    def promised(self, fact: str, **settings: Any) -> Any:
        """Values that the plugin offers of a fact; skip the check if there are none."""
        value = self.offers(**settings).get(fact)
        if not value:
            pytest.skip(f"{self.plugin.name} does not offer {fact}")
        return value

    def must_repeat(self) -> None:
        """Skip the check if two runs of the part may give different bits."""
        if not self.repeats:
            pytest.skip(f"{self.plugin.name} does not give the same bits in two runs, as the suite is told")

    def for_all(self, check: Callable[[Any], None], examples: st.SearchStrategy[Any], *, shrink: bool = True) -> None:
        """Run ``check`` on the profile's number of drawn examples; report the smallest that fails.

        ``shrink`` False reports the first that fails. Shrinking runs a hundred more, which is slow if they start ranks.
        """

        # `settings` writes attributes into the function that it decorates, which a bound method does not take.
        def run(example: Any) -> None:
            check(example)

        chosen = settings(
            max_examples=self.profile.examples,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            derandomize=not self.profile.new_draws,
            suppress_health_check=list(HealthCheck),
        )
        # Made for each call: the number of examples is that of the profile, which only a fixture knows.
        given(examples)(chosen(run))()
