"""The support matrix: which variants of which sections are compatible, and why others are not. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import field, frozen

from moefw.compose.registry import Registry
from moefw.core.errors import Problem
from moefw.testing.fit import Fit
from moefw.testing.variants import OURS, Variant, variants

MODEL: Final = {"num_layers": 4, "num_dense_layers": 3, "shared_expert_dim": 256}
"""Two layers for each of two ranks, one of them with experts."""


@frozen(kw_only=True)
class Refusal:
    """Two variants that no accepted spec combines, and the reason."""

    variant: Variant
    other: Variant
    reason: str


@frozen(kw_only=True)
class Matrix:
    """Compatibility of variants on a machine with every device and package.

    ``sections``: the variants that some accepted spec contains. ``alone``: those that none contains, with the reason.
    ``needs``: a variant's needs of the machine beyond a CPU. ``problems``: plugins that did not load.
    """

    sections: Mapping[str, Sequence[Variant]]
    refusals: Sequence[Refusal]
    alone: Mapping[Variant, str] = field(eq=False)
    needs: Mapping[Variant, Sequence[str]] = field(eq=False)
    problems: Sequence[Problem]

    @property
    def pairs(self) -> int:
        """Number of pairs of variants of two sections."""
        sizes = [len(of_section) for of_section in self.sections.values()]
        return sum(first * second for first, second in itertools.combinations(sizes, 2))

    @property
    def share_refused(self) -> float:
        """Share of these pairs that is refused, from 0 to 1."""
        return len(self.refusals) / max(1, self.pairs)

    def summary(self) -> str:
        """Refused share as a line of text."""
        return f"refused: {len(self.refusals)} of {self.pairs} combinations of two ({100 * self.share_refused:.1f} %)"


def survey(registry: Registry, *, ours_only: bool = True) -> Matrix:
    """Compatibility of each pair of variants, by resolving specs with both. ``ours_only``: of built-in plugins."""
    problems = [] if ours_only else registry.load_all()
    others = () if ours_only else [part.name for part in registry.parts() if part.distribution != OURS]
    sections = variants(registry, include=others)
    fit = Fit(sections, registry=registry, model=MODEL, pretend=True)
    every = [variant for of_section in sections.values() for variant in of_section]
    alone = {variant: fit.reason(variant).what for variant in every if not fit.fits(variant)}
    # Without those that no spec accepts: each would be refused with everything.
    fit.sections = {
        section: [variant for variant in of_section if variant not in alone] for section, of_section in sections.items()
    }
    refusals = []
    for of_first, of_second in itertools.combinations(fit.sections.values(), 2):
        for first, second in itertools.product(of_first, of_second):
            if not fit.fits(first, second):
                refusals.append(Refusal(variant=first, other=second, reason=fit.reason(first, second).what))
    needs = {variant: fit.needs(variant) for variant in every if fit.needs(variant)}
    return Matrix(
        sections=fit.sections,
        refusals=refusals,
        alone=alone,
        needs=needs,
        problems=problems,
    )
