"""The suite of combinations: a plugin with every other part, compared with the dense oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from attrs import evolve

from moefw.testing.combinations import Combination, drawn_from, usable_here
from moefw.testing.covering import pairs
from moefw.testing.fit import Fit
from moefw.testing.staged import SIZES, StagedModel, verify_staged
from moefw.testing.suites.base import Suite
from moefw.testing.verify import verify, verify_all


class CombinationSuite(Suite):
    """Combines ``plugin``, of any kind, with the built-in parts in specs, and runs these on real ranks.

    A layer is compared with the oracle; a whole model in pipeline stages with the same model in one. Without
    ``options``, each choice of the options that have no default is combined.
    """

    rtol: ClassVar[float | None] = None
    """A precision's largest error relative to fp64. None: the one that it states."""
    include: ClassVar[Sequence[str]] = ()
    """Names of installed plugins that are combined, too."""
    exclude: ClassVar[Sequence[str]] = ()
    """Names of plugins that are not combined."""
    _fit: ClassVar[Fit]

    def fit(self) -> Fit:
        """Variants to combine, and their fit. The plugin's own section contains only the plugin."""
        if "_fit" not in vars(type(self)):
            type(self)._fit = self._usable(self.parts)
        return type(self)._fit

    def _usable(self, fixed: Mapping[str, Any], staged: Mapping[str, Any] | None = None) -> Fit:
        """Plugin and the variants beside it. ``staged``: the sizes of a model in pipeline stages."""
        options = [dict(self.options)] if self.options else None
        names = {"include": self.include, "exclude": self.exclude}
        try:
            fit = usable_here((self.plugin,), only=self.plugin, options=options, fixed=fixed, staged=staged, **names)
        except ValueError as error:
            raise AssertionError(str(error)) from error
        if self.rtol is not None:
            precisions = [evolve(precision, rtol=self.rtol) for precision in fit.sections["precision"]]
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

    def test_in_pipeline_stages_a_model_trains_as_in_one(self) -> None:
        """The plugin's first variant, in every stage; the backward is whole, and then in two parts."""
        if 2 not in self.profile.worlds:
            pytest.skip(f"{self.plugin.name} runs on none but {self.profile.worlds} ranks")
        for schedule in ("1f1b", "zero-bubble"):
            fit = self._usable({"pipeline": {"use": schedule}, **self.parts}, staged=SIZES)
            parts = fit.company(fit.sections[self.section][0])
            assert parts is not None, f"{self.plugin.name} goes with no other parts in pipeline stages."
            verify_staged(StagedModel(parts=parts, plugins=(self.plugin,)), self.pool)
