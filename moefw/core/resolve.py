"""Spec x registry x world -> Assembly, or every misfit with its reason. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from moefw.core.assembly import Assembly, LayerAssembly, Parts
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import MoefwError, PlanError, PluginError, Problem, SpecError, nearest
from moefw.core.facts import Offers, match, offers
from moefw.core.plugin import Plugin
from moefw.core.registry import Registry
from moefw.core.site import Dims, Machine, Site, this_machine
from moefw.core.source import KeyPath, Marks, Tree, read_spec_file
from moefw.core.spec import RESERVED, Choice, Spec, structure_spec, with_defaults
from moefw.core.structure import structure

SECTIONS: Mapping[str, KeyPath] = {
    "model": ("model",),
    "routing": ("routing",),
    "dispatch": ("dispatch",),
    "gemm": ("gemm",),
    "precision": ("precision",),
    "parallel": ("parallel",),
    "data": ("data",),
    "optimizer": ("train", "optimizer"),
    "schedule": ("train", "schedule"),
}
"""Where in a spec each single part is chosen; memory policies are a list beside them."""


def assemble(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    defaults: Tree,
    registry: Registry | None = None,
    world: int | None = None,
    machine: Machine | None = None,
) -> Assembly:
    """Read a spec file and resolve it. Raises one SpecError, PluginError or PlanError that holds every problem."""
    problems: list[Problem] = []
    tree, marks = read_spec_file(path, overrides, problems)
    if problems and not tree:
        raise SpecError(problems)
    return assemble_tree(tree, marks, problems, defaults=defaults, registry=registry, world=world, machine=machine)


def assemble_tree(
    tree: Tree,
    marks: Marks,
    problems: list[Problem] | None = None,
    *,
    defaults: Tree,
    registry: Registry | None = None,
    world: int | None = None,
    machine: Machine | None = None,
) -> Assembly:
    """Resolve a spec given as plain data; see :func:`assemble`."""
    work = _Resolution(registry or Registry(), marks, list(problems or ()))
    spec = structure_spec(with_defaults(tree, defaults), marks, work.problems)
    spec_problems = len(work.problems)
    if spec is None:
        raise SpecError(work.problems)
    chosen = work.choose(spec)
    machine = machine or this_machine(spec.run.device)
    layout = work.lay_out(chosen, world)
    site, layers = work.fit(chosen, layout, machine)
    if layout is not None:
        work.check_batch(spec, layout)
    if work.problems:
        raise (SpecError if spec_problems else work.error_class)(work.problems)
    assert layout is not None
    parts = Parts(**chosen)
    assembly = Assembly(spec=spec, parts=parts, layout=layout, layers=layers, site=site, registry=work.registry)
    problems = work.registry.gather("moefw_check", assembly=assembly)
    if problems:
        raise PlanError(problems)
    return assembly


class _Resolution:
    """Collects problems while it goes as far as it can: a part that is broken is left out of later checks."""

    def __init__(self, registry: Registry, marks: Marks, problems: list[Problem]) -> None:
        self.registry, self.marks, self.problems = registry, marks, problems
        self.error_class: type[MoefwError] = PlanError
        self.paths: dict[int, KeyPath] = {}
        self.broken: set[str] = {problem.where for problem in problems}

    def add(self, problem: Problem, path: KeyPath) -> None:
        """Report a problem at ``path``, unless the value there was already reported and replaced by a default."""
        where = self.marks.where(path)
        if where not in self.broken:
            self.problems.append(attrs.evolve(problem, where=where))

    def choose(self, spec: Spec) -> dict[str, Any]:
        """Load the plugins that the spec names and read their options. A part that fails is missing."""
        self.broken = {problem.where for problem in self.problems}
        chosen: dict[str, Any] = {}
        for section, path in SECTIONS.items():
            choice: Any = spec
            for key in path:
                choice = getattr(choice, key)
            holder = type(spec) if len(path) == 1 else type(spec.train)
            hook = getattr(attrs.fields(holder), path[-1]).metadata["hook"]
            part = self._part(hook, choice, path)
            if part is not None:
                chosen[section] = part
        memory_hook = attrs.fields(Spec).memory.metadata["hook"]
        policies = [self._part(memory_hook, choice, ("memory", i)) for i, choice in enumerate(spec.memory)]
        chosen["memory"] = tuple(policy for policy in policies if policy is not None)
        for index, name in enumerate(spec.run.observers):
            self._attempt(lambda name=name: self.registry.load(name), ("run", "observers", index))
        return chosen

    def _part(self, hook: str, choice: Choice, path: KeyPath) -> Plugin | None:
        if not choice.use:
            return None
        found = self._attempt(lambda: self.registry.get(hook, choice.use), (*path, "use"))
        if found is None:
            return None
        options = dict(choice.options)
        name = options.pop("preset", None)
        if name is not None:
            presets = found.declaration.presets()
            if isinstance(name, str) and name in presets:
                options = {**presets[name], **options}
            else:
                self.add(Problem(f"{choice.use} has no preset {name!r}.", nearest(str(name), presets)), (*path, "preset"))
        before = len(self.problems)
        part = structure(found.declaration, options, path, self.marks, self.problems, also=frozenset(RESERVED))
        self.broken |= {problem.where for problem in self.problems[before:]}
        if part is not None:
            self.paths[id(part)] = path
        return part

    def _attempt(self, action: Any, path: KeyPath) -> Any:
        try:
            return action()
        except MoefwError as error:
            if isinstance(error, PluginError):
                self.error_class = PluginError
            for problem in error.problems:
                self.add(problem, path)
            return None

    def lay_out(self, chosen: Mapping[str, Any], world: int | None) -> LayoutPlan | None:
        """Arrange the world, or report why none fits."""
        if "parallel" not in chosen:
            return None
        plan: LayoutPlan | None = self._attempt(lambda: chosen["parallel"].plan(world), ("parallel",))
        return plan

    def fit(
        self, chosen: Mapping[str, Any], layout: LayoutPlan | None, machine: Machine
    ) -> tuple[Site, dict[int, LayerAssembly]]:
        """Match offers and needs at every MoE layer; a misfit that repeats over layers is told once.

        While a part is missing, a need that the missing part might have met is not reported.
        """
        model = chosen.get("model")
        dims = model.dims() if model else Dims(model_dim=0, expert_dim=0, num_experts=0, top_k=0)
        site = Site(dims=dims, layer=0, world=layout.world if layout else 1, machine=machine)
        if model is None:
            return site, {}
        parts: list[Plugin] = [part for name, part in chosen.items() if name != "memory"]
        parts += chosen["memory"]
        complete = layout is not None and len(chosen) == len(SECTIONS) + 1
        settled: dict[int, LayerAssembly] = {}
        told: set[tuple[int, str]] = set()

        def tell(part: Plugin, problem: Problem, option: str) -> None:
            if (id(part), problem.what) not in told:
                told.add((id(part), problem.what))
                self.add(problem, (*self.paths[id(part)], *(option.split(".") if option else ())))

        for layer in model.moe_layers() or [0]:
            here = site.at(layer)
            for part in parts:
                for problem in part.check(here):
                    tell(part, problem, problem.where)
            promises = [(part.name, part.offers(here)) for part in parts] + _machine_offers(layout, here)
            demands = [(part, need) for part in parts for need in part.needs(here)]
            facts, misfits = match(promises, [(part.name, need) for part, need in demands])
            for misfit in misfits:
                if complete or not misfit.may_be_met_elsewhere:
                    part = next(part for part, need in demands if need is misfit.need)
                    tell(part, Problem(misfit.what(), misfit.need.fix), misfit.need.option)
            settled[layer] = LayerAssembly(site=here, facts=facts)
        return site, settled

    def check_batch(self, spec: Spec, layout: LayoutPlan) -> None:
        """The global batch divides into micro-batches over the data-parallel ranks."""
        train, dp = spec.train, layout.sizes["dp"]
        unit = train.micro_batch * train.seq_len * dp
        if train.tokens_per_step % unit:
            what = (
                f"{train.tokens_per_step} tokens a step do not divide into micro-batches: "
                f"micro_batch {train.micro_batch} x seq_len {train.seq_len} x {dp} data-parallel ranks = {unit}."
            )
            near = max(1, round(train.tokens_per_step / unit)) * unit
            self.add(Problem(what, f"Use for example tokens_per_step: {near}."), ("train", "tokens_per_step"))


def _machine_offers(layout: LayoutPlan | None, site: Site) -> list[tuple[str, Offers]]:
    offered = [("this machine", offers(device=(site.machine.device,)))]
    if layout is not None:
        offered.append(("the layout", offers(axis=tuple(layout.sizes), axis_divides=dict(layout.sizes))))
    return offered
