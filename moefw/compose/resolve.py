"""Resolves a spec, registry and world to an assembly, or to every misfit with its reason. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import attrs

from moefw.compose.assembly import Assembly, ChosenPlugins, LayerAssembly
from moefw.compose.fitting import match, silence
from moefw.compose.machine import this_machine
from moefw.compose.registry import Registry
from moefw.compose.spec.sections import RESERVED, Choice, Spec, TrainSpec, plugin_fields, with_defaults
from moefw.compose.spec.source import UNREAD, KeyPath, Marks, Tree, key_path, read_spec_file, show
from moefw.compose.spec.structure import structure
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import MoefwError, PlanError, PluginError, Problem, SpecError, nearest
from moefw.core.facts import ANY, FACTS, Need, Offers, offers
from moefw.core.plugin import ModelPlugin, Plugin
from moefw.core.site import Dims, Machine, Site

MAX_LAYERS = 1000

A = TypeVar("A")


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
    return assemble_tree(tree, marks, problems, defaults=defaults, registry=registry, world=world, machine=machine)


def assemble_tree(
    tree: Tree,
    marks: Marks,
    problems: Sequence[Problem] = (),
    *,
    defaults: Tree,
    registry: Registry | None = None,
    world: int | None = None,
    machine: Machine | None = None,
) -> Assembly:
    """Resolve a spec given as plain data, whose ``problems`` so far are given; see :func:`assemble`."""
    work = _Resolution(registry or Registry(), marks, problems)
    spec = structure(Spec, with_defaults(tree, defaults), (), marks, work.problems[SpecError])
    assert spec is not None, "every section is a choice or has a default"
    work.choose(spec)
    device = spec.run.device
    work.check_regions()
    layout = work.lay_out(world)
    site, layers = work.fit(layout, machine or this_machine(device if isinstance(device, str) else "auto"))
    if layout is not None:
        work.ask(("train", "tokens_per_step"), _check_batch, spec.train, layout)
    work.raise_problems()
    assert layout is not None, "a layout that is missing is a problem"
    assembly = Assembly(spec=spec, parts=work.parts(), layers=layers, site=site, registry=work.registry)
    spelled = structure(Spec, assembly.resolved(), (), marks, work.problems[SpecError])
    assembly = attrs.evolve(assembly, spec=spelled or spec)
    for problem in work.ask((), work.registry.gather, "moefw_check", assembly=assembly) or ():
        work.tell(key_path(problem.where), problem)
    work.raise_problems()
    return assembly


@attrs.frozen(eq=False)
class _Placed:
    """A part, and its path in the spec. It prints as the part's name."""

    path: KeyPath
    part: Any

    @property
    def section(self) -> str:
        """The section of the part. All memory policies have the same one."""
        return next(key for key in reversed(self.path) if isinstance(key, str))

    def __str__(self) -> str:
        return str(self.part.name)


Statements = tuple[list[tuple[object, Offers]], list[tuple[_Placed, Need]]]


class _Resolution:
    """Resolves as much as possible and collects the problems, each once.

    Problems that follow from an unreadable value (``UNREAD``, which raises when used) or from a missing part (its
    section is in ``silent``) are left out.
    """

    def __init__(self, registry: Registry, marks: Marks, problems: Sequence[Problem]) -> None:
        self.registry, self.marks = registry, marks
        self.problems: dict[type[MoefwError], list[Problem]] = {
            SpecError: list(problems),
            PluginError: [],
            PlanError: [],
        }
        self.placed: list[_Placed] = []
        self.silent: set[str] = set()
        self.cause: Exception | None = None

    def tell(self, path: KeyPath, problem: Problem, kind: type[MoefwError] = PlanError) -> None:
        """Report a problem at ``path``. A repeated one, for example over layers, is reported once."""
        placed = attrs.evolve(problem, where=self.marks.where(path))
        if placed not in self.problems[kind]:
            self.problems[kind].append(placed)

    def raise_problems(self) -> None:
        """Raise all reported problems, as the first kind of error among them."""
        for kind, found in self.problems.items():
            if found:
                raise kind([problem for told in self.problems.values() for problem in told]) from self.cause

    def ask(self, path: KeyPath, question: Callable[..., A], /, *args: Any, **kwargs: Any) -> A | None:
        """Return the result of ``question``, or None if it raises.

        The error is reported, unless an earlier problem may have caused it.
        """
        try:
            return question(*args, **kwargs)
        except MoefwError as error:
            kind = PluginError if isinstance(error, PluginError) else PlanError
            for problem in error.problems:
                self.tell(path, problem, kind)
        except Exception as error:
            if not any(self.problems.values()):
                self.cause = error
                what = f"{question.__module__}.{question.__qualname__} raises {type(error).__name__}: {error}."
                self.tell(path, Problem(" ".join(what.split()), "This is a mistake in the plugin."), PluginError)
        return None

    def choose(self, spec: Spec) -> None:
        """Load the plugins that the spec names and read their options."""
        for path, hook, choice in plugin_fields(spec):
            part = None if choice is UNREAD else self._part(hook, choice, path)
            placed = _Placed(path, part)
            if part is None:
                self.silent.add(placed.section)
            else:
                self.placed.append(placed)
        for index, name in enumerate(self.ask((), tuple, spec.run.observers) or ()):
            self.ask(("run", "observers", index), self.registry.load, name)

    def _part(self, hook: str, choice: Choice, path: KeyPath) -> Plugin | None:
        found = self.ask((*path, "use"), self.registry.get, hook, choice.use)
        if found is None:
            return None
        options = dict(choice.options)
        if options.get("preset") is not None:
            options = {**self._preset(found.declaration, options["preset"], path), **options}
        options.pop("preset", None)
        problems = self.problems[SpecError]
        return self.ask(path, structure, found.declaration, options, path, self.marks, problems, also=RESERVED)

    def _preset(self, declaration: type[Plugin], name: Any, path: KeyPath) -> Mapping[str, Any]:
        presets = self.ask(path, declaration.presets) or {}
        if isinstance(name, str) and name in presets:
            return presets[name]
        if name is not UNREAD:
            problem = Problem(
                f"{declaration.name} has no preset {show(name)}.",
                nearest(name if isinstance(name, str) else "", presets),
            )
            self.tell((*path, "preset"), problem, SpecError)
        return {field.name: UNREAD for field in attrs.fields(declaration)}

    def _find(self, section: str) -> Any:
        return next((placed.part for placed in self.placed if placed.section == section), None)

    def check_regions(self) -> None:
        """Report regions named twice. One policy may treat a region, or one per mechanism if the policies join."""
        owners: dict[tuple[str, str], tuple[_Placed, int]] = {}
        for placed in self.placed:
            named = placed.part.regions if placed.section == "memory" else ()
            for index, region in enumerate(() if named is UNREAD else named):
                if region is UNREAD:
                    continue
                mechanism = placed.part.mechanism if placed.part.joins else ""
                first = owners.setdefault((region, mechanism), (placed, index))
                if first != (placed, index):
                    what = f"{placed} and {first[0]} both treat region {region!r}."
                    self.tell((*placed.path, "regions", index), Problem(what, "Name it once."))

    def lay_out(self, world: int | None) -> LayoutPlan | None:
        """Return the layout plan of the world, or report why there is none."""
        part = self._find("parallel")
        layout: LayoutPlan | None = self.ask(("parallel",), part.plan, world) if part else None
        if layout is None:
            self.silent.add("parallel")
        return layout

    def fit(self, layout: LayoutPlan | None, machine: Machine) -> tuple[Site, dict[int, LayerAssembly]]:
        """Run the checks of the parts, and match offers and needs at every MoE layer, or once if there is none.

        Equal layers share their facts.
        """
        model = self._find("model")
        dims = self.ask(("model",), model.dims) if model else None
        layers = self.ask(("model",), _moe_layers, model) if model else None
        site = Site(
            dims=dims or Dims(model_dim=UNREAD, expert_dim=UNREAD, num_experts=UNREAD, top_k=UNREAD),
            layer=0,
            num_layers=UNREAD if layers is None else getattr(model, "num_layers", max(layers, default=-1) + 1),
            layout=layout or UNREAD,
            ranks_per_node=self._find("parallel").ranks_per_node if layout else UNREAD,
            machine=machine,
        )
        for placed in self.placed:
            self.ask((), self._check, placed, site)
        stated: Statements | None = None
        facts: Mapping[str, Any] = {}
        settled: dict[int, LayerAssembly] = {}
        for layer in layers or [0]:
            here = site.at(layer)
            before, stated = stated, self.ask((), self._state, here, layout)
            if stated is not None and stated != before:
                facts = self.ask((), self._settle, *stated) or {}
            settled[layer] = LayerAssembly(site=here, facts=facts)
        return site, settled if layers else {}

    def _check(self, placed: _Placed, site: Site) -> None:
        for problem in self.ask(placed.path, placed.part.check, site) or ():
            self.tell((*placed.path, *key_path(problem.where)), problem)

    def _state(self, here: Site, layout: LayoutPlan | None) -> Statements:
        """Return the offers and needs of all parts at ``here``, and the offers of the layout and the machine."""
        promises: list[tuple[object, Offers]] = []
        demands: list[tuple[_Placed, Need]] = []
        for placed in self.placed:
            demands += [(placed, need) for need in self.ask(placed.path, placed.part.needs, here) or ()]
            offered = self.ask(placed.path, placed.part.offers, here)
            offered = None if offered is None else self.ask(placed.path, offers, **offered)
            if offered is None:
                self.silent.add(placed.section)
            else:
                promises.append((placed, {**silence(placed.section), **offered}))
        if layout is not None:
            promises.append(("the layout", offers(axis=tuple(layout.sizes), axis_divides=tuple(layout.sizes.items()))))
        wanted = (need.value for _, need in demands if need.fact == "package")
        packages = tuple(package for package in wanted if here.machine.has_package(package))
        capability = (here.machine.capability,) if here.machine.capability else ANY
        has = offers(device=(here.machine.device,), capability=capability, package=packages)
        promises.append(("this machine", has))
        return promises, demands

    def _settle(self, promises: list[tuple[object, Offers]], demands: list[tuple[_Placed, Need]]) -> dict[str, Any]:
        """Return the facts, and report the misfits that no missing part could have prevented."""
        facts, misfits = match(promises, demands)
        for misfit in misfits:
            if not self.silent.intersection(FACTS[misfit.need.fact].offered_by):
                self.tell((*misfit.asker.path, *key_path(misfit.need.option)), misfit.problem())
        return facts

    def parts(self) -> ChosenPlugins:
        """Return the parts by section."""
        single = {placed.section: placed.part for placed in self.placed if placed.section != "memory"}
        return ChosenPlugins(
            **single, memory=tuple(placed.part for placed in self.placed if placed.section == "memory")
        )


def _moe_layers(model: ModelPlugin) -> list[int]:
    layers = list(islice(model.moe_layers(), MAX_LAYERS + 1))
    if len(layers) > MAX_LAYERS:
        raise PlanError(f"{model.name} has more than {MAX_LAYERS} MoE layers.", "Use fewer layers.")
    return layers


def _check_batch(train: TrainSpec, layout: LayoutPlan) -> None:
    """Raise PlanError unless the global batch divides into micro-batches over dp, and these into parts over tp."""
    dp, tp = layout.sizes.get("dp", 1), layout.sizes.get("tp", 1)
    if train.micro_batch * train.seq_len % tp:
        what = f"micro_batch {train.micro_batch} x seq_len {train.seq_len} tokens do not divide into {tp} parts, one a "
        raise PlanError(f"{what}rank of tp.", f"Use a seq_len that {tp} divides.")
    unit = train.micro_batch * train.seq_len * dp
    if train.tokens_per_step % unit:
        what = (
            f"{train.tokens_per_step} tokens a step do not divide into micro-batches: "
            f"micro_batch {train.micro_batch} x seq_len {train.seq_len} x {dp} data-parallel ranks = {unit}."
        )
        near = max(1, round(train.tokens_per_step / unit)) * unit
        raise PlanError(what, f"Use for example tokens_per_step: {near}.")
