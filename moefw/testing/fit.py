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
from moefw.testing.variants import NO_FOLDER, SECTIONS, Variant, trains_beside_a_folder

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
        self.sections = sections
        self.registry = registry
        self.model = model
        self.pretend = pretend
        self._refusals: dict[frozenset[Variant], MoefwError | None] = {}
        """By the parts of a whole combination; None if it is accepted."""
        self._companies: dict[frozenset[Variant], Parts | None] = {}
        """Results of a search, by the chosen variants."""
        self._accepted: dict[frozenset[Variant], Parts] = {}
        """An accepted combination for each variant and each pair of variants that one is known to contain."""
        self._blamed: set[frozenset[Variant]] = set()
        """Sets of variants that a refusal of a mixture named."""
        self._needs: dict[Variant, list[Need]] = {}
        self._declared: dict[Variant, str] = {}

    def tree(self, parts: Parts) -> Tree:
        """Spec of a combination as plain data."""
        world = parts["parallel"].world
        train: dict[str, Any] = {"tokens_per_step": 64 * world, "micro_batch": 1, "seq_len": 16}
        chosen = {section: variant.choice for section, variant in parts.items()}
        if trains_beside_a_folder(chosen):
            train["weights"] = NO_FOLDER
        return {"model": dict(self.model), "train": train, **chosen}

    def resolve(self, parts: Parts) -> Assembly:
        """Assembly of a combination. Raises MoefwError if it is refused."""
        return assemble_tree(
            self.tree(parts),
            Marks("spec"),
            defaults=defaults(),
            registry=self.registry,
            world=parts["parallel"].world,
            machine=self._machine(parts.values()),
        )

    def refusal(self, parts: Parts) -> MoefwError | None:
        """Error that refuses a combination; None if it is accepted."""
        key = frozenset(parts.values())
        if key not in self._refusals:
            try:
                self.resolve(parts)
            except MoefwError as error:
                self._refusals[key] = error
            else:
                self._refusals[key] = None
                for number in (1, 2):
                    for together in itertools.combinations(parts.values(), number):
                        self._accepted.setdefault(frozenset(together), parts)
        return self._refusals[key]

    def company(self, *chosen: Variant) -> Parts | None:
        """Accepted combination that contains the chosen variants; None if none was found.

        Tries the plainest other variants, with those that each chosen variant needs, then each variant of each other
        section in turn.
        """
        key = frozenset(chosen)
        if key not in self._companies:
            candidates = self._candidates(chosen)
            self._companies[key] = next((parts for parts in candidates if self.refusal(parts) is None), None)
        return self._companies[key] or self._accepted.get(key)

    def fits(self, *chosen: Variant) -> bool:
        """Whether an accepted combination contains the chosen variants, one or two.

        Few resolves answer for many variants: what is tried first contains as many new pairs as possible.
        """
        if frozenset(chosen) in self._accepted:
            return True
        mixture = self._mixture(chosen)
        refusal = self.refusal(mixture)
        if refusal is None:
            return True
        # The mixture may be refused for parts that were not chosen: later mixtures avoid these, and a search decides.
        for problem in refusal.problems:
            self._blamed.add(frozenset(named(problem, mixture.values())))
        return self.company(*chosen) is not None

    def reason(self, *chosen: Variant) -> Problem:
        """Why no company was found for the chosen variants, if possible as a problem that names all of them.

        If two variants fail only because each variant of a third section is refused by one of them, it says so.
        """
        refusal = self.refusal(next(iter(self._candidates(chosen))))
        assert refusal is not None, "the first candidate was refused"
        best = max(refusal.problems, key=lambda problem: len(named(problem, chosen)))
        if len(chosen) < 2 or len(named(best, chosen)) == len(chosen):
            return best
        return next(self._thirds(chosen), best)

    def _thirds(self, chosen: Sequence[Variant]) -> Iterator[Problem]:
        """Yield a problem for each further section of which every variant is refused by one of the chosen variants."""
        for section in sorted(self.sections.keys() - {variant.section for variant in chosen}):
            thirds = [third for third in self.sections[section] if self.fits(third)]
            refused = [pair for pair in itertools.product(thirds, chosen) if not self.fits(*pair)]
            if {third for third, _ in refused} == set(thirds):
                reasons = dict.fromkeys(self.reason(*pair).what for pair in refused)
                both = " and ".join(variant.label for variant in chosen)
                fix = f"Change {' or '.join(variant.section for variant in chosen)}."
                yield Problem(f"no {section} goes with {both}. {' '.join(reasons)}", fix)

    def needs(self, variant: Variant) -> list[str]:
        """A variant's needs of the machine beyond a CPU: devices, compute capability, packages by name."""
        words = {"device": "{}", "capability": "compute capability {}", "package": "{}"}
        needs = []
        for need in self._needs_of(variant):
            if need.fact not in words:
                continue
            values = [need.value] if isinstance(need.value, str) else list(need.value)
            if "cpu" not in values:
                needs.append(words[need.fact].format(" or ".join(values)))
        return needs

    def rtol(self, variant: Variant) -> float:
        """Sum of the errors that the parts of a variant state."""
        try:
            return float(sum(getattr(part, "rtol", None) or 0.0 for part in self._parts(variant)))
        except Exception:  # resolve reports the plugin's fault
            return 0.0

    def formulas(self, gemm: Variant) -> tuple[str, ...]:
        """Items of the fact ``formula`` that a GEMM offers."""
        try:
            offered = {**silence("gemm"), **self._parts(gemm)[0].offers(self._site())}
        except Exception:  # resolve reports the plugin's fault
            return ()
        formulas: tuple[str, ...] = offered["formula"]
        return formulas

    def as_given(self, section: str, choice: Any) -> Variant:
        """Variant with a choice as in a spec, and the smallest world of a layout."""
        variant = Variant(section=section, label="as given", choice=choice)
        layout = next(iter(self._parts(variant)), None)
        return evolve(variant, world=layout.plan(None).world) if isinstance(layout, LayoutPlugin) else variant

    def _candidates(self, chosen: Sequence[Variant]) -> Iterable[Parts]:
        """Yield combinations with one or two chosen variants, in the order of :meth:`company`."""
        fixed = {variant.section: variant for variant in chosen}
        plain = {section: of_section[0] for section, of_section in self.sections.items()}
        if len(chosen) < 2:
            starts = [plain | fixed]
        else:
            # Each of the two may need parts that are not the plainest: take what its own company has of them. Where
            # both need a part of one section, the second wins, so both orders are tried.
            first, second = (_not_plain(self.company(variant) or {}, plain) for variant in chosen)
            starts = [plain | first | second | fixed, plain | second | first | fixed]
        yield from starts
        if self._machine_lacks(chosen):
            return
        for section in self.sections:
            if section in fixed:
                continue
            tried = set()
            for variant in self.sections[section]:
                declared = self._declared_by(variant)
                if declared not in tried:
                    tried.add(declared)
                    yield starts[0] | {section: variant}

    def _mixture(self, chosen: Sequence[Variant]) -> Parts:
        """Chosen variants with those of other sections that were named in no refusal and are new to them."""
        parts = {variant.section: variant for variant in chosen}
        for section, of_section in self.sections.items():
            if section not in parts:
                parts[section] = max(of_section, key=lambda variant: self._novelty(variant, parts))
        return {section: parts[section] for section in self.sections}

    def _novelty(self, variant: Variant, parts: Parts) -> tuple[bool, int]:
        """Whether no refusal named the variant, alone or with a part, and how many pairs with it are new."""
        pairs = [frozenset((variant, other)) for other in parts.values()]
        is_unblamed = self._blamed.isdisjoint([frozenset((variant,)), *pairs])
        num_new = sum(pair not in self._accepted for pair in pairs)
        return is_unblamed, num_new

    def _machine_lacks(self, chosen: Iterable[Variant]) -> bool:
        """Whether the machine, which no other variant changes, lacks a device or package."""
        machine = self._machine(chosen)
        for variant in chosen:
            for need in self._needs_of(variant):
                if need.fact == "device" and machine.device not in need.value:
                    return True
                if need.fact == "package" and not machine.has_package(need.value):
                    return True
        return False

    def _machine(self, chosen: Iterable[Variant]) -> Machine:
        """Machine for the chosen variants; a pretended one has a device on which all of them run."""
        if not self.pretend:
            return Machine(device="cpu")
        needs = itertools.chain.from_iterable(map(self._needs_of, chosen))
        devices = [need.value for need in needs if need.fact == "device"]
        common = (device for device in ("cuda", "cpu") if all(device in allowed for allowed in devices))
        return Pretended(device=next(common, "cuda"))

    def _needs_of(self, variant: Variant) -> list[Need]:
        """Needs of all plugins of a variant."""
        if variant not in self._needs:
            try:
                self._needs[variant] = [need for part in self._parts(variant) for need in part.needs(self._site())]
            except Exception:  # resolve reports the plugin's fault
                self._needs[variant] = []
        return self._needs[variant]

    def _declared_by(self, variant: Variant) -> str:
        """A variant's offers and needs as text. Of variants with equal text, only one is tried."""
        if variant not in self._declared:
            declared = variant.label
            if variant.section != "parallel":  # what a layout offers does not say how it arranges ranks
                try:
                    offers = [part.offers(self._site()) for part in self._parts(variant)]
                    declared = repr([variant.names, offers, self._needs_of(variant)])
                except Exception:  # resolve reports the plugin's fault
                    declared = variant.label
            self._declared[variant] = declared
        return self._declared[variant]

    def _parts(self, variant: Variant) -> list[Plugin]:
        """Plugins of a variant with their options, without those whose options do not read."""
        chosen = variant.choice if isinstance(variant.choice, list) else [variant.choice]
        plugins = []
        for choice in chosen:
            part = self.registry.get(SECTIONS[variant.section].name, choice["use"])
            options = {key: value for key, value in choice.items() if key != "use"}
            plugin = structure(part.declaration, options, (), Marks("spec"), [])
            if plugin is not None:
                plugins.append(plugin)
        return plugins

    def _site(self) -> Site:
        machine = Pretended(device="cuda") if self.pretend else Machine(device="cpu")
        dims: Any = {"model_dim": 256, "expert_dim": 256, "num_experts": 16, "top_k": 4}
        return lone_site(Dims(**dims), machine)


def _not_plain(parts: Parts, plain: Parts) -> dict[str, Variant]:
    """Variants of a combination that are not the plainest of their section."""
    return {section: variant for section, variant in parts.items() if variant != plain[section]}


def named(problem: Problem, chosen: Iterable[Variant]) -> list[Variant]:
    """Variants that a problem names, by plugin or by section of the spec."""
    return [variant for variant in chosen if _is_named(problem, variant)]


def _is_named(problem: Problem, variant: Variant) -> bool:
    """Whether a problem names a plugin of a variant or, in its place or fix, the section."""
    names = list(variant.names)
    if variant.section == "parallel":
        names.append("the layout")
    # Whole names: `my-topk` does not name `topk`.
    if any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", problem.what) for name in names):
        return True
    # The section at the head of a path, as in `memory[0].regions`.
    section = rf"(?<![\w.]){variant.section}(?=[.\[]|$)"
    return any(re.search(section, text) is not None for text in (problem.where, problem.fix))


def is_a_refusal(error: MoefwError) -> bool:
    """Whether an error means that parts do not fit, not that a plugin is broken."""
    return not isinstance(error, PluginError)
