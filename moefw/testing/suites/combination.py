"""The suite of combinations: a plugin with every other part, compared with the dense oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from attrs import evolve

from moefw.testing.announce import with_plugins
from moefw.testing.combinations import Combination, Sections, combinations, usable_here
from moefw.testing.covering import pairs
from moefw.testing.fit import Fit
from moefw.testing.suites.base import Suite
from moefw.testing.variants import SECTIONS, Variant
from moefw.testing.verify import verify, verify_all


class CombinationSuite(Suite):
    """Combines ``plugin``, of any kind, with all other plugins in specs, and runs these on real ranks.

    ``options``: the plugin's options in a spec; by default each choice of the options that have no default. ``rtol``:
    a precision's tolerance relative to fp64. ``parts`` fixes other sections, except for the layout, which is drawn.
    """

    rtol: ClassVar[float | None] = None
    _fit: ClassVar[tuple[Sections, Fit]]

    @property
    def section(self) -> str:  # type: ignore[override]
        """The section that chooses this kind of plugin."""
        return next(section for section, hook in SECTIONS.items() if hook == self.plugin.hook)

    def fit(self) -> tuple[Sections, Fit]:
        """Return the variants to combine, and their fit. The plugin's own section contains only the plugin."""
        if "_fit" not in vars(type(self)):
            type(self)._fit = self._ask()
        return type(self)._fit

    def _ask(self) -> tuple[Sections, Fit]:
        options: Sequence[dict[str, Any]] | None = [dict(self.options)] if self.options else None
        registry = with_plugins((self.plugin,))
        sections, fit = usable_here(registry=registry, plugin=self.plugin, options=options)
        assert sections[self.section], f"no spec that holds {self.plugin.name} is accepted: {self._refusal(options)}"
        found = dict(sections)
        for section, choice in self.parts.items():
            if section not in found or section == "parallel":
                raise ValueError(f"parts of combinations are sections of plugins beside the layout, not {section}.")
            same = [one for one in found[section] if one.choice == choice]
            found[section] = same or [Variant(section=section, label="as given", choice=choice)]
        if self.rtol is not None and "precision" in found:
            found["precision"] = [evolve(one, rtol=self.rtol) for one in found["precision"]]
        fit.sections = found
        return found, fit

    def _refusal(self, options: Sequence[dict[str, Any]] | None) -> str:
        layer_case = self.layer_case(parts={self.section: {"use": self.plugin.name, **dict(*(options or [{}]))}})
        try:
            layer_case.resolve()
        except Exception as error:
            return str(error)
        return "with no layout that this machine can run"

    def test_beside_every_other_part_the_layer_equals_the_oracle(self) -> None:
        """Each compatible variant of another section is combined with the plugin at least once."""
        _, fit = self.fit()
        verify_all(pairs(plugins=(self.plugin,), only=self.plugin, fit=fit), self.pool)

    def test_drawn_combinations_equal_the_oracle_or_say_why_not(self) -> None:
        """Tokens, skew, masks, alignment and all other parts are drawn together."""
        sections, _ = self.fit()

        def check(combination: Combination) -> None:
            verify(combination, self.pool)

        self.for_all(check, combinations(sections, (self.plugin,)))
