"""The search: from the best candidate known, a step on every axis, until enough are known.

Candidates are weighed by the time of a step; one that does not fit counts as slower, the more is missing, so that it is
still a way to those that fit. The same seed gives the same candidates in the same order.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Final

from attrs import define, field, frozen

from moefw.compose.assembly import Assembly
from moefw.core.errors import MoefwError
from moefw.core.plugin import PrecisionPlugin
from moefw.core.site import Machine
from moefw.planner.cluster import Cluster
from moefw.planner.formats import unmultiplied
from moefw.planner.overhead import left_bytes
from moefw.planner.report import Ledger
from moefw.planner.time.forecast import Forecast, forecast, lacks
from moefw.planner.time.software import OURS, Implementation, Software, implementation
from moefw.planner.tune.candidates import NOT_IN_SOFTWARE, NOT_MULTIPLIED, OUTCOMES, REFUSED, Candidate
from moefw.planner.tune.compose import Composer
from moefw.planner.tune.excerpts import Excerpts, Resolve
from moefw.planner.tune.settings import MEMORY, PIPELINE, PRECISION, Settings
from moefw.planner.tune.space import AnyAxis, Space

WEIGHT_OF_MISSING: Final = 3.0
"""How many times slower a candidate counts whose peak is twice a GPU's memory."""
LATER: Final = 1.05
"""How many times slower a candidate counts whose next steps need excerpts of their own, which take seconds each."""
STARTS: Final = 6
"""One of so many candidates is where a search starts: at the spec, or at a layout of pp and ep alone."""
BESIDE_WORLD: Final = (("pp", "tp", "cp"), ("pp", "ep", "etp"))
"""Axes whose product divides the ranks."""


@frozen(kw_only=True)
class Where:
    """Where candidates run: ranks of a cluster, with software."""

    world: int
    cluster: Cluster
    name: str
    runs: Software

    def machine(self, device: str) -> Machine:
        """What a candidate runs on that asks for a device."""
        return self.cluster.machine(self.name, device)

    def cannot_multiply(self, precision: PrecisionPlugin, *, is_own: bool) -> str:
        """Why a recipe is none here, whose products no GPU multiplies as they are timed; empty: it is one.

        ``is_own``: the spec's. Other software runs that with kernels of its own.
        """
        problem = unmultiplied(precision, self.cluster, self.name)
        if problem is not None:
            return problem.what
        has_kernels = is_own and self.runs.implementation != OURS
        if has_kernels or self.cluster.gpu.threads is not None or not precision.emulates:
            return ""
        told = f"{precision.name}, as it is set, emulates its products: that is slow on a GPU, and is not timed."
        return f"{told} Set it to multiply them, as with backend: torch."


@define
class Search:
    """A search through a space. ``said``: called with each candidate that was looked at."""

    space: Space
    where: Where
    resolve: Resolve
    excerpts: Excerpts
    said: Callable[[Candidate], None] = lambda _: None
    known: dict[str, Candidate] = field(factory=dict)
    least_bytes: int = field(default=0, init=False)
    """What no candidate holds less of on its fullest GPU, once one is known: see :func:`_least_bytes`."""
    _scheduled: dict[str, Settings] = field(factory=dict)
    """Settings with a schedule that goes with their pp, by the key of those without."""
    _assemblies: dict[str, Assembly | Candidate] = field(factory=dict)
    """What was resolved, by key, until its candidate is looked at: a schedule is tried before that."""
    _software: Implementation = field(init=False)

    @_software.default
    def _implementation(self) -> Implementation:
        return implementation(self.where.runs.implementation)

    def run(self, count: int, seed: int) -> None:
        """Look at candidates until ``count`` are known, or no step leads to another."""
        random = Random(seed)
        own = self.space.own
        others = [*self.space.starts()]
        random.shuffle(others)
        heap: list[tuple[float, int, str, bool]] = []

        def look(settings: Settings) -> None:
            key = key_of(settings)
            if key in self.known or len(self.known) >= count or not (settings is own or self._divides(settings)):
                return
            candidate = self.look(settings)
            # Where recipes vary, another one may be multiplied if the spec's own is not.
            if candidate.step is not None or (settings is own and PRECISION in own):
                heapq.heappush(heap, (self._weight(candidate), len(self.known), key, True))

        look(own)
        if self.own.outcome == REFUSED:
            # The spec's shards, too, may be of more ranks than there are.
            others = [each for start in others for each in (start, {**start, **self.space.replicated})]
        for number, settings in enumerate(others):
            if self.nothing_can_fit:
                return
            if heap and number >= count // STARTS:
                break
            look(self._with_schedule(settings, own))
        while heap and len(self.known) < count:
            weight, number, key, is_first = heapq.heappop(heap)
            steps = [settings for axis, settings in self._steps(self.known[key]) if _needs_no_excerpt(axis) is is_first]
            random.shuffle(steps)
            for settings in steps:
                look(settings)
            if is_first:
                heapq.heappush(heap, (weight * LATER, number, key, False))

    @property
    def nothing_can_fit(self) -> bool:
        """Whether no candidate can fit, whatever is measured."""
        return self.least_bytes > self.where.cluster.memory_bytes

    def _steps(self, candidate: Candidate) -> Iterator[tuple[AnyAxis, Settings]]:
        """Yield steps that may be faster: policies only make what does not fit, and leaving them out what does."""
        for axis, settings in self.steps_from(candidate.settings):
            adds = len(str(settings.get(MEMORY))) > len(str(candidate.settings.get(MEMORY)))
            if axis.kind != "memory" or adds is not candidate.fits:
                yield axis, settings

    def steps_from(self, settings: Settings) -> Iterator[tuple[AnyAxis, Settings]]:
        """Yield settings a step away, with the axis of the step. With another pp, the schedule may be another, too."""
        for axis, step in self.space.steps_from(settings):
            yield axis, self._with_schedule(step, settings) if axis.name == "pp" else step

    def _with_schedule(self, settings: Settings, before: Settings) -> Settings:
        """Settings of another pp than ``before``, which have its schedule, with one that goes with their pp."""
        key = key_of(settings)
        if key not in self._scheduled:
            self._scheduled[key] = self._nearest_schedule(settings, before) if self._divides(settings) else settings
        return self._scheduled[key]

    def _nearest_schedule(self, settings: Settings, before: Settings) -> Settings:
        """Settings with their own schedule, if ``check`` accepts it.

        Else with one that merges passes as before, or with any; of these with most nearly as many stages a rank.
        """
        if isinstance(self._assembled(settings), Assembly):
            return settings
        is_own = before == self.space.own  # which these ranks may not fit
        own = self.space.pipeline if is_own else self.resolve(before, self.where.world).parts.pipeline
        others = sorted(self.space.other_schedules(settings), key=lambda other: abs(_chunks(other) - own.chunks))
        accepted = []
        for other in others:
            found = self._assembled(other)
            if isinstance(found, Assembly):
                if found.parts.pipeline.merges is own.merges:
                    return other
                accepted.append(other)
        return next(iter(accepted), settings)

    def look(self, settings: Settings) -> Candidate:
        """Candidate of settings, with its time and peak, or why it is none."""
        key = key_of(settings)
        if key not in self.known:
            self.known[key] = self._look(settings)
            self.said(self.known[key])
        return self.known[key]

    def known_at(self, settings: Settings) -> Candidate | None:
        """Candidate of settings, if it was looked at."""
        return self.known.get(key_of(settings))

    def exact(self, candidate: Candidate, ledger_of: Callable[[Assembly], Ledger]) -> tuple[Candidate, Forecast | None]:
        """Candidate with the time and peak of a whole plan, and its forecast; None: a part cannot be planned."""
        assembly = self.resolve(candidate.settings, self.where.world)
        ledger = ledger_of(assembly)
        if ledger.unknown:
            unknown = Candidate(settings=candidate.settings, label=candidate.label, problems=(ledger.unknown,))
            self.known[key_of(candidate.settings)] = unknown
            return unknown, None
        time = self._forecast(assembly, ledger)
        found = self._candidate(candidate.settings, assembly, ledger, time)
        self.known[key_of(candidate.settings)] = found
        return found, time

    @property
    def own(self) -> Candidate:
        """The spec as it is. It is always looked at first."""
        return self.known[key_of(self.space.own)]

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Candidates with a time, in the order in which they were looked at."""
        return [candidate for candidate in self.known.values() if candidate.step is not None]

    @property
    def counts(self) -> dict[str, int]:
        """How many candidates there were, and of what."""
        outcomes = Counter(candidate.outcome for candidate in self.known.values())
        return {
            "candidates": len(self.known),
            **{outcome: outcomes[outcome] for outcome in OUTCOMES},
            "layer settings measured": self.excerpts.measured,
            "layer settings from the cache": self.excerpts.from_cache,
        }

    def _look(self, settings: Settings) -> Candidate:
        label = self.space.label(settings)
        assembly = self._assembled(settings)
        del self._assemblies[key_of(settings)]
        if isinstance(assembly, Candidate):
            return assembly
        try:
            measured = self.excerpts.of(settings, assembly)
        except MoefwError as error:
            return self._refused(settings, error)
        if measured.excerpt.unknown:
            return Candidate(settings=settings, label=label, problems=(measured.excerpt.unknown,))
        composer = Composer.of(assembly, measured.excerpt, measured.kinds)
        self.least_bytes = self.least_bytes or _least_bytes(assembly, composer.parameter_bytes())
        ledger = composer.ledger()
        lacking = lacks(self.where.cluster, ledger, self.where.runs)
        if lacking:
            problem = f"the cluster {self.where.name} has no {', '.join(lacking)}, which time needs."
            return Candidate(settings=settings, label=label, problems=(problem,))
        return self._candidate(settings, assembly, ledger, self._forecast(assembly, ledger))

    def _assembled(self, settings: Settings) -> Assembly | Candidate:
        """Assembly of settings, or the candidate that says why there is none."""
        key = key_of(settings)
        if key not in self._assemblies:
            self._assemblies[key] = self._assemble(settings)
        return self._assemblies[key]

    def _assemble(self, settings: Settings) -> Assembly | Candidate:
        """The same, resolved anew."""
        # Before anything is resolved: some schedules take a second to import.
        absent = [*self._software.lacks_named(_chosen(settings))]
        try:
            if not absent:
                assembly = self.resolve(settings, self.where.world)
                absent = [*self._software.lacks(assembly)]
        except MoefwError as error:
            return self._refused(settings, error)
        if absent:
            problems = [f"{self.where.runs.implementation} has no {part}." for part in absent]
            return self._out(settings, problems, NOT_IN_SOFTWARE)
        is_own = settings.get(PRECISION) == self.space.own.get(PRECISION)
        reason = self.where.cannot_multiply(assembly.parts.precision, is_own=is_own)
        return self._out(settings, [reason], NOT_MULTIPLIED) if reason else assembly

    def _refused(self, settings: Settings, error: MoefwError) -> Candidate:
        """Candidate that ``check`` refuses, with every problem."""
        return self._out(settings, [" ".join(problem.what.split()) for problem in error.problems], REFUSED)

    def _out(self, settings: Settings, problems: Sequence[str], are: str) -> Candidate:
        """Candidate that is none. ``are``: which problems."""
        label = self.space.label(settings)
        return Candidate(settings=settings, label=label, problems=tuple(problems), problems_are=are)

    def _forecast(self, assembly: Assembly, ledger: Ledger) -> Forecast:
        where = self.where
        return forecast(assembly, ledger, where.cluster, where.name, where.runs)

    def _candidate(self, settings: Settings, assembly: Assembly, ledger: Ledger, time: Forecast) -> Candidate:
        sizes = assembly.layout.sizes
        dimensions = sum(sizes.get(axis, 1) > 1 for axis in ("pp", "tp", "cp", "ep", "etp"))
        return Candidate(
            settings=settings,
            label=self.space.label(settings),
            step=time.step,
            inputs=time.inputs,
            peak_bytes=ledger.peak_bytes,
            left_bytes=left_bytes(self.where.cluster, ledger),
            position=ledger.position,
            complexity=dimensions + len(assembly.parts.memory) + assembly.parts.pipeline.chunks,
            sizes=dict(sizes),
            tokens_per_s_per_gpu=time.tokens_per_s_per_gpu,
        )

    def _weight(self, candidate: Candidate) -> float:
        return candidate.step_s * (1 + WEIGHT_OF_MISSING * candidate.missing_bytes / self.where.cluster.memory_bytes)

    def _divides(self, settings: Settings) -> bool:
        """Whether the sizes of a layout divide the ranks."""
        own = {path[-1]: value for path, value in settings.items() if isinstance(value, int)}
        for axes in BESIDE_WORLD:
            product = 1
            for axis in axes:
                product *= own.get(axis, 1)
            if self.where.world % product:
                return False
        return True


def _least_bytes(assembly: Assembly, parameter_bytes: int) -> int:
    """Bytes that the fullest rank holds at least in any layout: its part of the parameters and of their gradients.

    No layout shares them more evenly than over all ranks. Parameters are in fp32; gradients have two bytes each at
    least, where all parameters train. Policies may keep the states of the optimizer in host memory.
    """
    least = parameter_bytes if assembly.frozen else parameter_bytes * 3 // 2
    return least // assembly.layout.world


def _chunks(settings: Settings) -> int:
    """Stages a rank that the options of a schedule say; 1 if they say none."""
    chunks: int = settings[PIPELINE].get("chunks", 1)
    return chunks


def _chosen(settings: Settings) -> Mapping[str, Sequence[str]]:
    """Names of the parts that settings choose, by section, where they choose one."""
    choices = {path: value for path, value in settings.items() if isinstance(value, Mapping) and "use" in value}
    return {str(section): [value["use"]] for (section, *rest), value in choices.items() if not rest}


def _needs_no_excerpt(axis: AnyAxis) -> bool:
    return axis.kind == "schedule" or axis.name == "pp"


def key_of(settings: Settings) -> str:
    """Text that is equal for equal settings."""
    return json.dumps([[list(path), value] for path, value in sorted(settings.items())], sort_keys=True)
