"""Compatibility of variants: resolve over their product, with cached results. No torch here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.fitting import silence
from moefw.compose.machine import lone_site
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks, Tree
from moefw.compose.spec.structure import structure
from moefw.core.errors import MoefwError, PluginError, Problem
from moefw.core.facts import Need
from moefw.core.plugin import LayoutPlugin, Plugin
from moefw.core.site import Dims, Machine, Site
from moefw.testing.variants import SECTIONS, Variant

Parts = Mapping[str, Variant]
"""A variant for each section."""


@frozen(kw_only=True)
class Pretended(Machine):
    """A machine on which everything is installed."""

    def has_package(self, name: str) -> bool:
        """Return True."""
        return True


class Fit:
    """Results of resolve for a model with a variant in each section.

    ``pretend``: assume any device and all packages. Otherwise a CPU with the packages that are installed here.
    """

    def __init__(
        self,
        sections: Mapping[str, Sequence[Variant]],
        *,
        registry: Registry,
        model: Mapping[str, Any],
        pretend: bool = False,
    ) -> None:
        self.sections, self.registry, self.model, self.pretend = sections, registry, model, pretend
        self._said: dict[frozenset[Variant], MoefwError | None] = {}
        self._companies: dict[frozenset[Variant], Parts | None] = {}
        self._met: dict[frozenset[Variant], Parts] = {}
        self._apart: set[frozenset[Variant]] = set()
        self._needs: dict[Variant, list[Need]] = {}
        self._stated: dict[Variant, str] = {}

    def tree(self, parts: Parts) -> Tree:
        """Return the spec of a combination as plain data."""
        world = parts["parallel"].world
        train = {"tokens_per_step": 64 * world, "micro_batch": 1, "seq_len": 16}
        return {"model": dict(self.model), "train": train, **{section: one.choice for section, one in parts.items()}}

    def resolve(self, parts: Parts) -> Assembly:
        """Return the assembly of a combination. Raises MoefwError if it is refused."""
        return assemble_tree(
            self.tree(parts),
            Marks("spec"),
            defaults=defaults(),
            registry=self.registry,
            world=parts["parallel"].world,
            machine=self._machine(parts.values()),
        )

    def refusal(self, parts: Parts) -> MoefwError | None:
        """Return the error that refuses a combination; None if it is accepted."""
        key = frozenset(parts.values())
        if key not in self._said:
            try:
                self.resolve(parts)
                self._said[key] = None
                for number in (1, 2):
                    for met in itertools.combinations(parts.values(), number):
                        self._met.setdefault(frozenset(met), parts)
            except MoefwError as error:
                self._said[key] = error
        return self._said[key]

    def company(self, *chosen: Variant) -> Parts | None:
        """Return an accepted combination that contains the chosen variants; None if none was found.

        Tries the plainest other variants, with those that each chosen variant needs, then each variant of each other
        section in turn.
        """
        key = frozenset(chosen)
        if key not in self._companies:
            candidates = self._candidates(chosen)
            self._companies[key] = next((parts for parts in candidates if self.refusal(parts) is None), None)
        return self._companies[key] or self._met.get(key)

    def fits(self, *chosen: Variant) -> bool:
        """Return whether an accepted combination contains the chosen variants, one or two.

        Few resolves answer for many variants: what is tried first contains as many new pairs as possible.
        """
        if frozenset(chosen) in self._met:
            return True
        mixture = self._mixture(chosen)
        refusal = self.refusal(mixture)
        if refusal is None:
            return True
        for problem in refusal.problems:
            self._apart.add(frozenset(named(problem, mixture.values())))
        return self.company(*chosen) is not None

    def reason(self, *chosen: Variant) -> Problem:
        """Return why no company was found for the chosen variants, if possible as a problem that names all of them.

        If two variants fail only because each variant of a third section is refused by one of them, it says so.
        """
        refusal = self.refusal(next(iter(self._candidates(chosen))))
        assert refusal is not None, "the first candidate was refused"
        best = max(refusal.problems, key=lambda problem: len(named(problem, chosen)))
        if len(chosen) < 2 or len(named(best, chosen)) == len(chosen):
            return best
        return next(self._thirds(chosen), best)

    def _thirds(self, chosen: Sequence[Variant]) -> Iterator[Problem]:
        for section in sorted(self.sections.keys() - {variant.section for variant in chosen}):
            pairs = [(third, one) for third in self.sections[section] if self.fits(third) for one in chosen]
            refused = [pair for pair in pairs if not self.fits(*pair)]
            if {third for third, _ in refused} == {third for third, _ in pairs}:
                reasons = dict.fromkeys(self.reason(*pair).what for pair in refused)
                both = " and ".join(variant.label for variant in chosen)
                fix = f"Change {' or '.join(variant.section for variant in chosen)}."
                yield Problem(f"no {section} goes with {both}. {' '.join(reasons)}", fix)

    def needs(self, variant: Variant) -> list[str]:
        """Return a variant's needs of the machine beyond a CPU: devices, compute capability, packages by name."""
        words = {"device": "{}", "capability": "compute capability {}", "package": "{}"}
        found = [need for need in self._asks(variant) if need.fact in words]
        values = [[need.value] if isinstance(need.value, str) else list(need.value) for need in found]
        pairs = zip(found, values)
        return [words[need.fact].format(" or ".join(value)) for need, value in pairs if "cpu" not in value]

    def rtol(self, variant: Variant) -> float:
        """Return the sum of the errors that the parts of a variant offer."""
        try:
            return float(sum(part.offers(self._site()).get("rtol", 0.0) for part in self._parts(variant)))
        except Exception:  # resolve reports the plugin's fault
            return 0.0

    def formulas(self, gemm: Variant) -> tuple[str, ...]:
        """Return the items of the fact ``formula`` that a GEMM offers."""
        try:
            offered = {**silence("gemm"), **self._parts(gemm)[0].offers(self._site())}
        except Exception:  # as above
            return ()
        found: tuple[str, ...] = offered["formula"]
        return found

    def as_given(self, section: str, choice: Any) -> Variant:
        """Return a variant with a choice as in a spec, and the smallest world of a layout."""
        variant = Variant(section=section, label="as given", choice=choice)
        layout = next(iter(self._parts(variant)), None)
        return evolve(variant, world=layout.plan(None).world) if isinstance(layout, LayoutPlugin) else variant

    def _candidates(self, chosen: Sequence[Variant]) -> Iterable[Parts]:
        fixed = {variant.section: variant for variant in chosen}
        plain = {section: found[0] for section, found in self.sections.items()}
        companies = [self.company(variant) or {} for variant in chosen] if len(chosen) > 1 else []
        merged: list[dict[str, Variant]] = [
            dict(plain) | _not_plain(one, plain) | _not_plain(other, plain) | fixed
            for one, other in itertools.permutations(companies, 2)
        ] or [plain | fixed]
        yield from merged
        if self._lacks(chosen):
            return
        for section in (section for section in self.sections if section not in fixed):
            asked = set()
            for variant in self.sections[section]:
                if self._states(variant) not in asked:
                    asked.add(self._states(variant))
                    yield merged[0] | {section: variant}

    def _mixture(self, chosen: Sequence[Variant]) -> Parts:
        """Return the chosen variants with those of other sections that were named in no refusal and are new to them."""
        parts = {variant.section: variant for variant in chosen}
        for section, found in self.sections.items():
            if section not in parts:
                parts[section] = max(found, key=lambda variant: self._news(variant, parts))
        return {section: parts[section] for section in self.sections}

    def _news(self, variant: Variant, parts: Parts) -> tuple[bool, int]:
        pairs = [frozenset((variant, other)) for other in parts.values()]
        return self._apart.isdisjoint([frozenset((variant,)), *pairs]), sum(pair not in self._met for pair in pairs)

    def _lacks(self, chosen: Iterable[Variant]) -> bool:
        """Return whether the machine, which no other variant changes, lacks a device or package."""
        machine = self._machine(chosen)
        needs = [need for variant in chosen for need in self._asks(variant)]
        return any(
            (need.fact == "device" and machine.device not in need.value)
            or (need.fact == "package" and not machine.has_package(need.value))
            for need in needs
        )

    def _machine(self, chosen: Iterable[Variant]) -> Machine:
        if not self.pretend:
            return Machine(device="cpu")
        wanted = [need.value for variant in chosen for need in self._asks(variant) if need.fact == "device"]
        fits = (device for device in ("cuda", "cpu") if all(device in value for value in wanted))
        return Pretended(device=next(fits, "cuda"))

    def _asks(self, variant: Variant) -> list[Need]:
        if variant not in self._needs:
            try:
                self._needs[variant] = [need for part in self._parts(variant) for need in part.needs(self._site())]
            except Exception:  # resolve reports the plugin's fault
                self._needs[variant] = []
        return self._needs[variant]

    def _states(self, variant: Variant) -> str:
        """Return a variant's offers and needs as text. Of variants with equal text, only one is tried."""
        if variant not in self._stated:
            said = variant.label
            if variant.section != "parallel":
                try:
                    offers = [part.offers(self._site()) for part in self._parts(variant)]
                    said = repr([variant.names, offers, self._asks(variant)])
                except Exception:  # as above
                    said = variant.label
            self._stated[variant] = said
        return self._stated[variant]

    def _parts(self, variant: Variant) -> list[Plugin]:
        chosen = variant.choice if isinstance(variant.choice, list) else [variant.choice]
        built = []
        for choice in chosen:
            part = self.registry.get(SECTIONS[variant.section], choice["use"])
            options = {key: value for key, value in choice.items() if key != "use"}
            made = structure(part.declaration, options, (), Marks("spec"), [])
            if made is not None:
                built.append(made)
        return built

    def _site(self) -> Site:
        machine = Pretended(device="cuda") if self.pretend else Machine(device="cpu")
        dims: Any = {"model_dim": 256, "expert_dim": 256, "num_experts": 16, "top_k": 4}
        return lone_site(Dims(**dims), machine)


def _not_plain(parts: Parts, plain: Parts) -> dict[str, Variant]:
    return {section: variant for section, variant in parts.items() if variant != plain[section]}


def named(problem: Problem, chosen: Iterable[Variant]) -> list[Variant]:
    """Return the variants that a problem names, by plugin or by section of the spec."""
    return [variant for variant in chosen if _is_named(problem, variant)]


def _is_named(problem: Problem, variant: Variant) -> bool:
    words = [*variant.names, *(["the layout"] if variant.section == "parallel" else [])]
    said = any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", problem.what) for word in words)
    key = rf"(?<![\w.]){variant.section}(?=[.\[]|$)"
    return said or any(re.search(key, text) is not None for text in (problem.where, problem.fix))


def is_a_refusal(error: MoefwError) -> bool:
    """Return whether an error means that parts do not fit, not that a plugin is broken."""
    return not isinstance(error, PluginError)
