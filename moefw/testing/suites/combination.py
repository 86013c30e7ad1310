"""The suite of combinations: a plugin with every other part, compared with the dense oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import evolve

from moefw.testing.combinations import Combination, drawn_from, usable_here
from moefw.testing.covering import pairs
from moefw.testing.fit import Fit
from moefw.testing.suites.base import Suite
from moefw.testing.variants import SECTIONS
from moefw.testing.verify import verify, verify_all


class CombinationSuite(Suite):
    """Combines ``plugin``, of any kind, with the built-in parts in specs, and runs these on real ranks.

    ``options``: the plugin's options in a spec; by default each choice of the options that have no default. ``rtol``:
    a precision's tolerance relative to fp64. ``parts`` fixes other sections. ``include`` names installed plugins that
    are combined, too; ``exclude`` those that are not.
    """

    rtol: ClassVar[float | None] = None
    include: ClassVar[Sequence[str]] = ()
    exclude: ClassVar[Sequence[str]] = ()
    _fit: ClassVar[Fit]

    @property
    def section(self) -> str:  # type: ignore[override]
        """The section that chooses this kind of plugin."""
        return next(section for section, hook in SECTIONS.items() if hook == self.plugin.hook)

    def fit(self) -> Fit:
        """Return the variants to combine, and their fit. The plugin's own section contains only the plugin."""
        if "_fit" not in vars(type(self)):
            type(self)._fit = self._ask()
        return type(self)._fit

    def _ask(self) -> Fit:
        options = [dict(self.options)] if self.options else None
        names = {"include": self.include, "exclude": self.exclude}
        try:
            fit = usable_here((self.plugin,), only=self.plugin, options=options, fixed=self.parts, **names)
        except ValueError as error:
            raise AssertionError(str(error)) from error
        if self.rtol is not None:
            precisions = [evolve(one, rtol=self.rtol) for one in fit.sections["precision"]]
            fit.sections = {**fit.sections, "precision": precisions}
        return fit

    def test_beside_every_other_part_the_layer_equals_the_oracle(self) -> None:
        """Each compatible variant of another section is combined with the plugin at least once."""
        verify_all(pairs(plugins=(self.plugin,), only=self.plugin, fit=self.fit()), self.pool)

    def test_drawn_combinations_equal_the_oracle_or_say_why_not(self) -> None:
        """Tokens, skew, masks, alignment and all other parts are drawn together."""

        def check(combination: Combination) -> None:
            verify(combination, self.pool)

        self.for_all(check, drawn_from(self.fit(), (self.plugin,)))
