"""Hypothesis strategies for specs over the product of all plugins; see :func:`moefw.testing.verify.verify`.

A combination is a variant of each section with a small MoE layer: ranks with few, no or unequal numbers of tokens,
skewed routing, masks, aligned rows, experts as in gpt-oss.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen
from hypothesis import note
from hypothesis import strategies as st
from ruamel.yaml import YAML

from moefw.compose.registry import Registry
from moefw.compose.spec.source import Tree
from moefw.core.errors import nearest
from moefw.core.facts import ANY
from moefw.core.kinds import kind_of
from moefw.core.plugin import Plugin
from moefw.testing.announce import with_plugins
from moefw.testing.fit import Fit
from moefw.testing.variants import SECTIONS, Variant, in_stages, of_a_layer, of_part, variants

if TYPE_CHECKING:
    from moefw.testing.layer_case import LayerCase
    from moefw.testing.oracle import Rule

Sections = Mapping[str, Sequence[Variant]]
"""The variants that a section may take."""

NUM_EXPERTS = 8
TOP_K = 2
SKEWS = ("even", "one", "starved")
ALIGNMENTS = (1, 4)
MAX_TOKENS = 6


@frozen(kw_only=True)
class Combination:
    """A variant of each section, and the tokens of each rank. ``plugins``: plugins that need not be installed."""

    parts: Mapping[str, Variant] = field(eq=False)
    tokens: tuple[int, ...]
    skew: str = "even"
    masked: bool = False
    shared: bool = False
    clamped: bool = False
    biased_experts: bool = False
    row_alignment: int = 1
    seed: int = 0
    plugins: tuple[type[Plugin], ...] = ()

    def spec(self) -> Tree:
        """Spec as plain data."""
        return self._layer_case().tree()

    def yaml(self) -> str:
        """Spec as YAML, with all other settings in comments."""
        tokens, *settings = self._settings()
        head = [f"# moefw check this.yaml --world {len(self.tokens)}", f"# {tokens}; {', '.join(settings)}"]
        return "\n".join([*head, *(f"{section}: {flow(value)}" for section, value in self.spec().items())]) + "\n"

    def layer_case(self) -> LayerCase:
        """Layer case. Raises the errors of resolve.

        Its row alignment is the one that the parts agreed on, or its lcm with the drawn one if the dispatcher offers
        that.
        """
        layer_case = self._layer_case()
        assembly = layer_case.resolve()
        agreed = assembly.layers[0].facts.get("row_alignment", 1)
        offered = assembly.parts.dispatch.offers(assembly.layers[0].site).get("row_alignment", ())
        common = math.lcm(agreed, self.row_alignment)
        is_offered = offered == ANY or common in offered
        return self._layer_case(row_alignment=common if is_offered else agreed)

    def rule(self) -> Rule | None:
        """The oracle's rule for the router; None if the oracle has no formula for it."""
        from moefw.testing.oracle import Rule

        words = self.parts["routing"].words
        return None if words is None else Rule(top_k=TOP_K, **words)

    def _layer_case(self, **more: Any) -> LayerCase:
        """Layer case, with row alignment 1 unless ``more`` sets it."""
        from moefw.testing.layer_case import LayerCase

        return LayerCase(
            tokens=self.tokens,
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            skew=self.skew,
            masked=self.masked,
            shared=self.shared,
            clamped=self.clamped,
            biased_experts=self.biased_experts,
            adapter_scale=self.parts["adapter"].adapter_scale if "adapter" in self.parts else 0.0,
            seed=self.seed,
            parts={section: variant.choice for section, variant in self.parts.items()},
            plugins=self.plugins,
            **more,
        )

    def _settings(self) -> list[str]:
        """Words for what a spec does not say, the tokens first."""
        tokens = f"tokens of each rank: {', '.join(map(str, self.tokens))}"
        settings = [tokens, f"skew {self.skew}", f"seed {self.seed}", f"row alignment {self.row_alignment}"]
        if self.masked:
            settings.append("every third token masked")
        return settings

    def __repr__(self) -> str:
        parts = ", ".join(f"{section} {variant.label}" for section, variant in self.parts.items())
        return f"Combination({parts}; {', '.join(self._settings())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every field of every variant


def settled(combination: Combination) -> Combination:
    """Combination adapted to the fields of its variants.

    See ``smallest``, ``equal_tokens``, ``needs_all_tokens`` and ``regions`` there.
    """
    parts = combination.parts.values()
    smallest = max(variant.smallest for variant in parts)
    tokens = tuple(number if number == 0 else max(number, smallest) for number in combination.tokens)
    masked = combination.masked
    if any(variant.equal_tokens for variant in parts):
        masked = False
    if any(variant.equal_tokens or variant.needs_all_tokens for variant in parts):
        tokens = (max(tokens),) * len(tokens)
    treats_shared_expert = any("shared_experts" in variant.regions for variant in parts)
    return evolve(combination, tokens=tokens, masked=masked, shared=combination.shared or treats_shared_expert)


def usable_here(
    plugins: tuple[type[Plugin], ...] = (),
    *,
    only: type[Plugin] | None = None,
    options: Sequence[Mapping[str, Any]] | None = None,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    include: Collection[str] = (),
    exclude: Collection[str] = (),
    staged: Mapping[str, Any] | None = None,
) -> Fit:
    """Variants that this machine can run, a section's plainest first, and their fit.

    They are those of a layer or, given the sizes of a model, those that split it into pipeline stages (``staged``).
    ``only``: its section contains only this plugin, with each set of ``options``. The other arguments are those of
    :func:`combinations`.
    """
    registry = with_plugins(plugins if only is None else (*plugins, only))
    requested = {*include, *(plugin.name for plugin in plugins)}
    every = variants(registry, include=requested)
    sections = _without(exclude, of_a_layer(every) if staged is None else in_stages(every), registry)
    if only is not None:
        kind = kind_of(only)
        section = kind.section
        sections[section] = tuple(of_part(registry.get(kind.name, only.name), section, options))
        requested.add(only.name)
        if not sections[section]:
            what = f"{only.name} has options without a default that no test can guess"
            raise ValueError(f"{what}; set them: options = [{{...}}]")
    model: Any = Combination(parts={}, tokens=(1,), shared=True).spec()["model"]
    # `fit` reads this very `sections`, which the loops below still change. It decides nothing before they have run.
    fit = Fit(sections, registry=registry, model=model if staged is None else staged)
    for section, choice in fixed.items():
        if section not in SECTIONS:
            raise ValueError(f"fixed: {section!r} is no section of plugins. {nearest(section, SECTIONS)}")
        of_choice = tuple(variant for variant in sections.get(section, ()) if variant.choice == choice)
        sections[section] = of_choice or (fit.as_given(section, choice),)
    for section in ("precision", "memory"):
        sections[section] = tuple(
            evolve(variant, rtol=max(variant.rtol, fit.rtol(variant))) for variant in sections[section]
        )
    for section, of_section in sections.items():
        if not of_section:
            raise ValueError(f"exclude leaves nothing for {section}.")
    usable = {
        section: [variant for variant in of_section if fit.fits(variant)] for section, of_section in sections.items()
    }
    for section, of_section in sections.items():
        plainest = of_section[0]
        if not usable[section] and (section in fixed or requested & {*plainest.names}):
            raise ValueError(f"no spec with {' and '.join(plainest.names)} is accepted: {fit.reason(plainest)}")
    fit.sections = usable
    return fit


def _without(
    exclude: Collection[str], sections: Mapping[str, Sequence[Variant]], registry: Registry
) -> dict[str, tuple[Variant, ...]]:
    """Variants that use no excluded plugin. Raises ValueError if a name to exclude is none of theirs."""
    known = {name for of_section in sections.values() for variant in of_section for name in variant.names}
    for name in set(exclude) - known:
        raise ValueError(f"exclude: no plugin here is called {name!r}. {nearest(name, registry.names)}")
    return {
        section: tuple(variant for variant in of_section if not {*variant.names} & {*exclude})
        for section, of_section in sections.items()
    }


def combinations(
    plugins: Sequence[type[Plugin]] = (),
    *,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    include: Collection[str] = (),
    exclude: Collection[str] = (),
) -> st.SearchStrategy[Combination]:
    """Strategy for combinations, most accepted, some refused. It shrinks towards the defaults of a spec.

    Drawn from are the built-in plugins, ``plugins``, which need not be installed, and installed ones named in
    ``include``; not those named in ``exclude``. ``fixed``: the choices of some sections, as in a spec. Raises
    ValueError or PluginError at the first draw for names that are not there.
    """
    own = tuple(plugins)

    @cache
    def fit() -> Fit:
        return usable_here(own, fixed=fixed, include=include, exclude=exclude)

    return st.deferred(lambda: drawn_from(fit(), own))


@st.composite
def drawn_from(draw: st.DrawFn, fit: Fit, plugins: tuple[type[Plugin], ...] = ()) -> Combination:
    """Draw a combination of the variants of ``fit``. ``plugins``: those of them that need not be installed."""
    parts = {section: draw(st.sampled_from(of_section)) for section, of_section in fit.sections.items()}
    world = parts["parallel"].world
    formulas = fit.formulas(parts["gemm"])
    combination = settled(
        Combination(
            parts=parts,
            tokens=tuple(draw(st.lists(st.integers(0, MAX_TOKENS), min_size=world, max_size=world))),
            skew=draw(st.sampled_from(SKEWS)),
            masked=draw(st.booleans()),
            shared=draw(st.booleans()),
            clamped="clamped_swiglu" in formulas and draw(st.booleans()),
            biased_experts="bias" in formulas and draw(st.booleans()),
            row_alignment=draw(st.sampled_from(ALIGNMENTS)),
            seed=draw(st.integers(0, 1000)),
            plugins=plugins,
        )
    )
    note(combination.yaml())
    return combination


def flow(value: object) -> str:
    """Value as YAML on one line."""
    yaml = YAML(pure=True)
    yaml.default_flow_style = True
    yaml.width = 10_000
    text = io.StringIO()
    yaml.dump(value, text)
    return text.getvalue().removesuffix("...\n").strip()
