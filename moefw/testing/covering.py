"""Pairwise covering: few combinations that together contain every compatible pair of variants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from moefw.core.plugin import Plugin
from moefw.testing.combinations import ALIGNMENTS, SKEWS, Combination, Sections, settled, usable_here
from moefw.testing.fit import Fit
from moefw.testing.variants import Variant

TOKENS: Mapping[int, tuple[tuple[int, ...], ...]] = {
    1: ((5,), (1,), (4,)),
    2: ((5, 3), (0, 4), (1, 1)),
    4: ((4, 0, 5, 2), (1, 3, 0, 0), (2, 1, 6, 3), (0, 0, 1, 0)),
}
"""Tokens of each rank, by world: unequal, empty, single."""

Pair = frozenset[Variant]


def pairs(
    *, plugins: tuple[type[Plugin], ...] = (), only: type[Plugin] | None = None, fit: Fit | None = None
) -> list[Combination]:
    """Covering set: each pair of variants that resolve accepts is in at least one combination.

    The set is deterministic and small: the two largest sections alone need the product of their sizes. ``only``: cover
    only pairs with a variant of that plugin. ``fit``: the variants and their fit; by default those of the
    built-in plugins and of ``plugins`` that this machine can run.
    """
    fit = usable_here(plugins) if fit is None else fit
    return [_dress(parts, number, fit, plugins) for number, parts in enumerate(covering(fit, only=only))]


def covering(fit: Fit, *, only: type[Plugin] | None = None) -> Iterator[Mapping[str, Variant]]:
    """Yield the parts of a covering set; see :func:`pairs`."""
    pairs_to_cover = list(fitting_pairs(fit))
    if only is not None:
        pairs_to_cover = [pair for pair in pairs_to_cover if any(only.name in variant.names for variant in pair)]
    return _cover(pairs_to_cover, fit)


def all_pairs(sections: Sections) -> Iterator[tuple[Variant, Variant]]:
    """Yield every pair of variants of two different sections."""
    for of_first, of_second in itertools.combinations(sections.values(), 2):
        yield from itertools.product(of_first, of_second)


def fitting_pairs(fit: Fit) -> Iterator[Pair]:
    """Yield every pair of variants of two sections that some accepted combination contains."""
    return (frozenset(pair) for pair in all_pairs(fit.sections) if fit.fits(*pair))


def met(parts: Mapping[str, Variant]) -> set[Pair]:
    """Pairs that a combination contains."""
    return {frozenset(pair) for pair in itertools.combinations(parts.values(), 2)}


def _dress(parts: Mapping[str, Variant], number: int, fit: Fit, plugins: tuple[type[Plugin], ...] = ()) -> Combination:
    """Combination of parts with tokens, skew, mask, alignment and experts, which vary with ``number``."""
    patterns = TOKENS[parts["parallel"].world]
    formulas = fit.formulas(parts["gemm"])
    return settled(
        Combination(
            parts=parts,
            tokens=patterns[number % len(patterns)],
            skew=SKEWS[number // 3 % len(SKEWS)],
            masked=number % 3 == 1,
            shared=number % 2 == 0,
            clamped=number % 4 in (1, 2) and "clamped_swiglu" in formulas,
            biased_experts=number % 4 > 1 and "bias" in formulas,
            row_alignment=ALIGNMENTS[number // 2 % len(ALIGNMENTS)],
            seed=number,
            plugins=plugins,
        )
    )


def _cover(pairs_to_cover: list[Pair], fit: Fit) -> Iterator[Mapping[str, Variant]]:
    """Yield combinations greedily: start from an uncovered pair, then add variants that cover the most other pairs."""
    uncovered = dict.fromkeys(pairs_to_cover)  # a set that keeps its order: the covering set is deterministic
    # Largest sections first: they have the most pairs to cover.
    sections = sorted(fit.sections, key=lambda section: -len(fit.sections[section]))
    while uncovered:
        first = next(iter(uncovered))
        parts = {variant.section: variant for variant in sorted(first, key=lambda variant: variant.section)}
        for section in sections:
            if section not in parts:
                best = _best(parts, section, uncovered, fit)
                if best is not None:
                    parts[section] = best
        if len(parts) < len(sections) or fit.refusal(parts) is not None:
            # All pairs fit, and the whole does not: take a combination that is known to be accepted with the first.
            parts = dict(fit.company(*first) or {})
        yield {section: parts[section] for section in fit.sections}
        for pair in met(parts):
            uncovered.pop(pair, None)


def _best(parts: Mapping[str, Variant], section: str, uncovered: Mapping[Pair, None], fit: Fit) -> Variant | None:
    """Variant of a section that fits each of ``parts`` and covers most pairs; None if none fits."""
    best: Variant | None = None
    most = -1
    for variant in fit.sections[section]:
        pairs_of_variant = [frozenset((variant, other)) for other in parts.values()]
        gain = sum(pair in uncovered for pair in pairs_of_variant)
        if gain > most and all(fit.fits(*pair) for pair in pairs_of_variant):
            best = variant
            most = gain
    return best
