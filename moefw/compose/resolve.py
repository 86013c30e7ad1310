"""Resolves a spec, registry and world to an assembly, or to every misfit with its reason. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import attrs

from moefw.compose.advice import advised
from moefw.compose.assembly import Assembly, ChosenPlugins, LayerAssembly
from moefw.compose.batches import batch_problems
from moefw.compose.fitting import RULES, match, offers_of, silence
from moefw.compose.graphs import Asker, aligned_rows_problems, graph_needs, graph_problems
from moefw.compose.local_files import file_problems
from moefw.compose.machine import this_machine
from moefw.compose.pipeline_schedule import PipelineSchedule
from moefw.compose.registry import OBSERVER, Registry
from moefw.compose.routes import route_problems
from moefw.compose.spec.origins import Origins
from moefw.compose.spec.sections import RESERVED, Spec, TrainSpec, over, plugin_fields, with_defaults
from moefw.compose.spec.source import KeyPath, Marks, Tree, key_path, read_spec_file, show
from moefw.compose.spec.structure import structure
from moefw.compose.spec.unknown import UNKNOWN, UnknownUsedError, is_known
from moefw.compose.stages import stage_problems
from moefw.compose.updates import logits_need, update_need, with_update
from moefw.compose.watched_site import WatchedSite
from moefw.core.choice import Choice
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import MoefwError, PlanError, PluginError, Problem, SpecError, nearest
from moefw.core.facts import ANY, FACTS, Need, Offers, offers
from moefw.core.plugin import OPTIMIZER, DataSourcePlugin, ModelPlugin, OptimizerMemoryPolicyPlugin, Plugin
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
    machine: Machine | Callable[[str], Machine] | None = None,
    trains: bool = True,
    for_run: bool = False,
    files_here: bool = False,
) -> Assembly:
    """Read a spec file and resolve it. Raises one SpecError, PluginError or PlanError that holds every problem.

    ``machine``: what the spec runs on, or a function that returns it for the device that the spec asks for; None: this
    machine. ``trains``: see :class:`moefw.Site`. ``for_run``: problems are also those of what a training run needs of
    its data and its routes, as far as they are known before files are opened. ``files_here``: also those of files that
    this machine lacks, and of a folder that cannot hold the run.
    """
    problems: list[Problem] = []
    tree, marks = read_spec_file(path, overrides, problems)
    return assemble_tree(
        tree,
        marks,
        problems,
        defaults=defaults,
        registry=registry,
        world=world,
        machine=machine,
        trains=trains,
        for_run=for_run,
        files_here=files_here,
    )


def assemble_tree(
    tree: Tree,
    marks: Marks,
    problems: Sequence[Problem] = (),
    *,
    defaults: Tree,
    registry: Registry | None = None,
    world: int | None = None,
    machine: Machine | Callable[[str], Machine] | None = None,
    trains: bool = True,
    for_run: bool = False,
    files_here: bool = False,
) -> Assembly:
    """Resolve a spec given as plain data, whose ``problems`` so far are given; see :func:`assemble`."""
    work = _Resolution(registry or Registry(), marks, problems, defaults, for_run)
    written = tree
    tree = with_defaults(work.with_preset(tree, defaults), defaults)
    spec = structure(Spec, tree, (), marks, work.problems[SpecError])
    assert spec is not None, "every section is a choice or has a default"
    work.choose(spec)
    device = "auto" if spec.run is UNKNOWN or spec.run.device is UNKNOWN else spec.run.device
    work.check_regions()
    work.check_phases(spec.train)
    work.check_freeze(spec.train)
    work.check_clip(spec.train)
    layout = work.lay_out(world)
    work.ask_for_graphs(spec.train, layout, trains=trains)
    work.ask_for_an_update()
    if not isinstance(machine, Machine):
        machine = (machine or this_machine)(device)
    site, layers = work.fit(layout, machine, trains=trains)
    if layout is not None:
        with work.asking(()):
            for problem in batch_problems(spec.train, layout, work.other_world):
                work.tell(("train", "tokens_per_step"), problem)
        work.check_stages(layout, spec.train)
        work.check_graphs(layout, spec.train, layers)
    if for_run:
        work.check_routes(spec)
    if files_here:
        work.check_files(spec)
    work.raise_problems()
    assert layout is not None, "a layout that is missing is a problem"
    assembly = Assembly(
        spec=spec,
        parts=work.parts(),
        layers=layers,
        site=site,
        registry=work.registry,
        origins=Origins(marks, written, work.presets),
    )
    spelled = structure(Spec, assembly.resolved(), (), marks, work.problems[SpecError])
    assembly = attrs.evolve(assembly, spec=spelled or spec)
    for problem in work.registry.problems(assembly):
        work.tell(key_path(problem.where), problem)
    work.raise_problems()
    return assembly


@attrs.frozen(eq=False)
class _Placed:
    """A part, and its path in the spec. It prints as the part's name."""

    path: KeyPath
    part: Any

    @cached_property
    def section(self) -> str:
        """The section of the part. All memory policies have the same one."""
        return _section(self.path)

    def __str__(self) -> str:
        return str(self.part.name)


@attrs.frozen
class _Statements:
    """The offers and needs at a site, and the names of facts of which an offer is not known."""

    promises: list[tuple[object, Offers]]
    demands: list[tuple[_Placed, Need]]
    unknown: set[str]


class _Resolution:
    """Resolves as much as possible and collects the problems, each once.

    Left out is what depends on a value that could not be read (``UNKNOWN``), and a misfit that an unknown offer could
    prevent.
    """

    def __init__(
        self, registry: Registry, marks: Marks, problems: Sequence[Problem], defaults: Tree, for_run: bool
    ) -> None:
        self.registry = registry
        self.marks = marks
        self.defaults = defaults
        self.for_run = for_run
        self.problems: dict[type[MoefwError], list[Problem]] = {
            SpecError: list(problems),
            PluginError: [],
            PlanError: [],
        }
        self.declarations: dict[KeyPath, type[Plugin]] = {}
        self.presets: dict[KeyPath, tuple[str, Mapping[str, Any]]] = {}
        self.placed: list[_Placed] = []
        self.inner: list[_Placed] = []
        self.sections: set[str] = {"memory"}
        """Sections of the spec that choose a part, or none as ``memory`` may."""
        self.unread: set[str] = set()
        """Those of which a part could not be read."""
        self.graph_demands: list[tuple[_Placed, Need]] = []
        self.update_demands: list[tuple[_Placed, Need]] = []
        self.cause: Exception | None = None

    def tell(self, path: KeyPath, problem: Problem, kind: type[MoefwError] = PlanError) -> None:
        """Report a problem at ``path``. A repeated one, for example over layers, is reported once."""
        placed = attrs.evolve(problem, where=self.marks.where(path))
        if placed not in self.problems[kind]:
            self.problems[kind].append(placed)

    def raise_problems(self) -> None:
        """Raise all reported problems, as the first kind of error among them."""
        for kind, problems in self.problems.items():
            if problems:
                everything = [problem for of_a_kind in self.problems.values() for problem in of_a_kind]
                raise kind(map(self._advised, everything)) from self.cause

    def _advised(self, problem: Problem) -> Problem:
        return advised(problem, self.registry, self.declarations, self.defaults)

    @contextmanager
    def asking(self, path: KeyPath, plugin: Plugin | type[Plugin] | None = None, what: str = "") -> Iterator[None]:
        """Report an error inside, and go on. A use of an unknown value is none: that value has its own problem.

        The error is the user's, at ``path``; or that of ``what`` of ``plugin``, if that raises anything but a misfit.
        """
        try:
            yield
        except UnknownUsedError:
            return
        except Exception as error:
            problems = error.problems if isinstance(error, MoefwError) else (_fault(error),)
            is_users = isinstance(error, MoefwError) and not (plugin and isinstance(error, PluginError))
            if is_users:
                for problem in problems:
                    self.tell(path, problem, PluginError if isinstance(error, PluginError) else PlanError)
            elif plugin is None:
                raise
            elif is_known(plugin):  # else it may be what a built-in function says of an option that is not
                self.cause = error
                origin = self.registry.origin(plugin)
                faults = (attrs.evolve(problem, what=f"{origin}, {what}: {problem.what}") for problem in problems)
                known = self.problems[PluginError]
                known += [fault for fault in faults if fault not in known]

    def ask(self, path: KeyPath, question: Callable[..., A], /, *args: Any, **kwargs: Any) -> A | None:
        """Result of ``question``, or None if it raises."""
        with self.asking(path):
            return question(*args, **kwargs)
        return None

    def answer(self, placed: _Placed, method: str, kind: type[A], *args: Any) -> A | None:
        """Answer of a part, or None if it raises or is not of kind ``kind``."""
        with self.asking(placed.path, placed.part, f"{method}()"):
            return _of_kind(kind, getattr(placed.part, method)(*args))
        return None

    def listed(self, placed: _Placed, method: str, kind: type[A], *args: Any) -> list[A]:
        """Items of kind ``kind`` that a part lists, and those of iterators in the list, up to an error."""

        def read(items: Any) -> None:
            with self.asking(placed.path, placed.part, f"{method}()"):
                for item in items(*args) if callable(items) else items:
                    if isinstance(item, Iterator):
                        read(item)
                    else:
                        listed.append(_of_kind(kind, item))

        listed: list[A] = []
        read(getattr(placed.part, method))
        return listed

    def choose(self, spec: Spec) -> None:
        """Load the plugins that the spec names and read their options."""
        for path, kind, choice in plugin_fields(spec):
            part = None if choice is UNKNOWN else self._part(kind, choice, path)
            self.sections.add(_section(path))
            if part is None:
                self.unread.add(_section(path))
            else:
                self.placed.append(_Placed(path, part))
        with self.asking(()):
            for index, name in enumerate(spec.run.observers):
                self.ask(("run", "observers", index), self.registry.load, name, OBSERVER)

    def _part(self, kind: str, choice: Choice, path: KeyPath) -> Plugin | None:
        registered = self.ask((*path, "use"), self.registry.get, kind, choice.use)
        if registered is None:
            return None
        declaration = registered.declaration
        options = dict(choice.options)
        if options.get("preset") is not None:
            options = {**self._preset(declaration, options["preset"], path), **options}
        options.pop("preset", None)
        with self.asking(path, declaration, "its options"):
            part = structure(declaration, options, path, self.marks, self.problems[SpecError], also=RESERVED)
            self.declarations[path] = declaration
            return None if part is None else self._filled(part, path)
        return None

    def _filled(self, part: Plugin, path: KeyPath) -> Plugin:
        """Part, with the plugins that its options name in the place of their choices."""
        for field in attrs.fields(type(part)):
            kind = field.metadata.get("kind")
            choices = getattr(part, field.name)
            if kind and choices is not UNKNOWN:
                inner = (self._inner(kind, choice, (*path, field.name, n)) for n, choice in enumerate(choices))
                object.__setattr__(part, field.name, tuple(inner))
        return part

    def _inner(self, kind: str, choice: Any, path: KeyPath) -> Any:
        part = None if choice is UNKNOWN else self._part(kind, choice, path)
        if part is None:
            return UNKNOWN
        self.inner.append(_Placed(path, part))
        return part

    def _preset(self, declaration: type[Plugin], name: Any, path: KeyPath) -> Mapping[str, Any]:
        presets: Mapping[str, Any] = {}
        with self.asking(path, declaration, "presets()"):
            presets = declaration.presets()
        if isinstance(name, str) and name in presets:
            self.presets[path] = (name, presets[name])
            return presets[name]
        if name is not UNKNOWN:
            problem = Problem(
                f"{declaration.name} has no preset {show(name)}.",
                nearest(name if isinstance(name, str) else "", presets),
            )
            self.tell((*path, "preset"), problem, SpecError)
        return {field.name: UNKNOWN for field in attrs.fields(declaration) if field.init}

    def with_preset(self, tree: Tree, defaults: Tree) -> Tree:
        """Tree over what the model's preset says in all sections; these are unknown if it is."""
        model = with_defaults({"model": tree.get("model")}, {"model": defaults["model"]})["model"]
        if not isinstance(model, Mapping) or model.get("preset") is None:
            return tree
        preset = model["preset"]
        sections = None
        use = model.get("use")
        if isinstance(use, str) and preset is not UNKNOWN:
            registered = self.ask(("model", "use"), self.registry.get, "model", use)
            if registered is not None:
                sections = self._sections(registered.declaration, preset)
        if sections is not None:
            without = {key: value for key, value in model.items() if key != "preset"}
            merged = over(dict(sections), {**tree, "model": without})
            self.presets[()] = (str(preset), merged)
            return merged
        # What the preset would have said of a section is unknown, unless the user chose something else there.
        attention, routing = (
            section if section is UNKNOWN or section else UNKNOWN
            for section in (tree.get("attention"), tree.get("routing"))
        )
        return tree | {
            "model": {**model, "preset": UNKNOWN},
            "attention": {**attention, "preset": UNKNOWN} if isinstance(attention, dict) else attention,
            "routing": routing,
        }

    def _sections(self, declaration: Any, preset: Any) -> Mapping[str, Any] | None:
        """Return what a model's preset says, or report why it says nothing."""
        path: KeyPath = ("model", "preset")
        with self.asking(path, declaration, "sections()"):
            try:
                sections: Mapping[str, Any] | None = declaration.sections(preset) if isinstance(preset, str) else None
            except SpecError as error:
                for problem in error.problems:
                    self.tell(path, problem, SpecError)
                return None
            if sections is None:
                known = nearest(preset if isinstance(preset, str) else "", declaration.presets())
                self.tell(path, Problem(f"{declaration.name} has no preset {show(preset)}.", known), SpecError)
            return sections
        return None

    def _find(self, section: str) -> _Placed | None:
        return next((placed for placed in self.placed if placed.section == section), None)

    def check_regions(self) -> None:
        """Report regions named twice. One policy may treat a region, or one per mechanism if the policies join.

        Of those that store states in another format, there is one. The optimizer's states have policies of their own.
        """
        owners: dict[tuple[str, str], tuple[_Placed, int]] = {}
        rounders: dict[str, _Placed] = {}
        for placed in self.placed:
            if placed.section != "memory":
                continue
            with self.asking(placed.path, placed.part, "regions"):
                mechanism = placed.part.mechanism if placed.part.joins else ""
                rounds = placed.part.rounds
                for index, region in enumerate(placed.part.regions):
                    if region is UNKNOWN:
                        continue
                    place = (*placed.path, "regions", index)
                    if region == OPTIMIZER and not isinstance(placed.part, OptimizerMemoryPolicyPlugin):
                        what = f"{placed} treats what forward saves, and the optimizer's states are not."
                        fix = "Leave the region out, and use a policy for these states, such as optimizer-offload."
                        self.tell(place, Problem(what, fix))
                        continue
                    owner = owners.setdefault((region, mechanism), (placed, index))
                    if owner != (placed, index):
                        what = f"{placed} and {owner[0]} both treat region {region!r}."
                        self.tell(place, Problem(what, "Name it once."))
                        continue
                    rounder = rounders.setdefault(region, placed) if rounds else placed
                    if rounder != placed:
                        what = f"{placed} and {rounder} both store region {region!r} in a format of their own."
                        self.tell(place, Problem(what, "Name one of them."))

    def check_phases(self, train: TrainSpec) -> None:
        """Report policies that turn the phases of a layer into one, where something runs these one by one."""
        pipeline = self._find("pipeline")
        who: list[str] = []
        with self.asking(("train", "delay_wgrads")):
            who += ["train.delay_wgrads"] if train.delay_wgrads else []
        if pipeline:
            with self.asking(pipeline.path, pipeline.part, "merges"):
                who += [f"the pipeline {pipeline.part.name}"] if pipeline.part.merges else []
        if not who:
            return
        for placed in self.placed:
            with self.asking(placed.path, placed.part, "regions"):
                if placed.section == "memory" and "layer" in placed.part.regions:
                    what = f"{placed} makes the layer one phase, and {who[-1]} runs the phases of a layer one by one."
                    fix = "Name regions inside of it instead, such as attention, router and experts."
                    self.tell((*placed.path, "regions", placed.part.regions.index("layer")), Problem(what, fix))

    def check_freeze(self, train: TrainSpec) -> None:
        """Report weights that are to stay those of a folder where none is named."""
        adapter = self._find("adapter")
        with self.asking(("train", "weights")):
            if adapter and adapter.part.freezes and train.weights is None:
                what = f"{adapter} trains beside the weights of a folder, and train.weights names none."
                self.tell((*adapter.path, "use"), Problem(what, "Name one."))
                return
        with self.asking(("train", "freeze")):
            if train.freeze and train.weights is None:
                what = "frozen weights stay those of a folder, and train.weights names none."
                self.tell(("train", "freeze"), Problem(what, "Name one, or leave freeze out."))
        with self.asking(("train", "frozen_weights")):
            freezes = train.freeze or (adapter and adapter.part.freezes)
            if train.frozen_weights == "as_stored" and not freezes:
                what = "only frozen weights are held as their folder has them, and none is frozen."
                fix = "Name some in train.freeze, choose an adapter, or leave frozen_weights out."
                self.tell(("train", "frozen_weights"), Problem(what, fix))

    def check_clip(self, train: TrainSpec) -> None:
        """Report frozen weights beside a clip of logits, which scales weights."""
        optimizer = self._find("optimizer")
        adapter = self._find("adapter")
        if optimizer:
            with self.asking(optimizer.path, optimizer.part, "qk_clipping()"):
                freezes = train.freeze or (adapter and adapter.part.freezes)
                if freezes and optimizer.part.qk_clipping() is not None:
                    what = f"{optimizer} scales weights of attention to clip logits (QK-Clip), and weights are frozen."
                    self.tell((*optimizer.path, "use"), Problem(what, "Leave the clip out, or train all weights."))

    def lay_out(self, world: int | None) -> LayoutPlan | None:
        """Return the layout plan of the world, or report why there is none."""
        placed = self._find("parallel")
        layout = self.answer(placed, "plan", LayoutPlan, world) if placed else None  # type: ignore[type-abstract]
        return layout if layout is not None and is_known(layout.sizes) else None

    def other_world(self, world: int) -> LayoutPlan | None:
        """Return the layout plan of another world, None if the layout has none for it."""
        placed = self._find("parallel")
        try:
            return placed.part.plan(world) if placed else None
        except PlanError:
            return None

    def check_stages(self, layout: LayoutPlan, train: TrainSpec) -> None:
        """Report why there are no pipeline stages, or none that can run the step."""
        pipeline = self._find("pipeline")
        model = self._find("model")
        if pipeline and model:
            with self.asking(pipeline.path, pipeline.part, "check_batches()"):
                schedule = PipelineSchedule(pipeline.part, layout.size("pp"), self.registry)
                for problem in stage_problems(schedule, model.part, layout, train):
                    self.tell(key_path(problem.where), problem)

    def ask_for_graphs(self, train: TrainSpec, layout: LayoutPlan | None, *, trains: bool) -> None:
        """Let ``train.graphs`` ask for what its graphs need, where the spec is one to train with."""
        with self.asking(("train", "graphs")):
            if trains and layout is not None and train.graphs == "step":
                asker = _Placed(("train",), Asker())
                self.graph_demands = [(asker, need) for need in graph_needs(layout)]

    def ask_for_an_update(self) -> None:
        """Let the assembly ask for an update that is the same under every layout, and for logits that it may clip."""
        optimizer = self._find("optimizer")
        if optimizer:
            asker = _Placed(optimizer.path, Asker("the assembly"))
            self.update_demands = [(asker, update_need(optimizer.part))]
            with self.asking(optimizer.path, optimizer.part, "qk_clipping()"):
                self.update_demands += [(asker, need) for need in logits_need(optimizer.part)]

    def check_graphs(self, layout: LayoutPlan, train: TrainSpec, layers: Mapping[int, LayerAssembly]) -> None:
        """Report why steps are not replayed, beside what parts offer."""
        pipeline = self._find("pipeline")
        if self.graph_demands and pipeline:
            with self.asking(("train", "graphs")):
                facts = [layer.facts for layer in layers.values()]
                for problem in (*graph_problems(train, layout, pipeline.part), *aligned_rows_problems(facts)):
                    self.tell(key_path(problem.where), problem)

    def check_routes(self, spec: Spec) -> None:
        """Report why routes can be neither recorded nor replayed."""
        model = self._find("model")
        if model:
            with self.asking(model.path, model.part, "moe_layers()"):
                for problem in route_problems(spec, _moe_layers(model.part)):
                    self.tell(key_path(problem.where), problem)

    def check_files(self, spec: Spec) -> None:
        """Report files that this machine lacks, of data and others, and a folder that cannot hold the run."""
        with self.asking(()):
            for problem in file_problems(spec.train.weights, spec.train.replay_routes, spec.run.dir):
                self.tell(key_path(problem.where), problem)
        for placed in (*self.placed, *self.inner):
            if isinstance(placed.part, DataSourcePlugin):
                for problem in self.listed(placed, "check_files", Problem):
                    self.tell((*placed.path, *key_path(problem.where)), problem)

    def fit(
        self, layout: LayoutPlan | None, machine: Machine, *, trains: bool
    ) -> tuple[Site, dict[int, LayerAssembly]]:
        """Run the checks of the parts, and match offers and needs at every MoE layer, or once if there is none.

        Parts that do not read the number of the layer are not asked again. Equal layers share their facts.
        """
        model = self._find("model")
        parallel = self._find("parallel")
        dims = self.answer(model, "dims", Dims) if model else None
        layers: list[int] | None = None
        num_layers: int = UNKNOWN
        if model:
            with self.asking(model.path, model.part, "moe_layers()"):
                layers = _moe_layers(model.part)
                num_layers = max(getattr(model.part, "num_layers", 0), max(layers, default=-1) + 1)
        site = Site(
            dims=dims or Dims(model_dim=UNKNOWN, expert_dim=UNKNOWN, num_experts=UNKNOWN, top_k=UNKNOWN),
            layer=0,
            num_layers=num_layers,
            layout=layout or UNKNOWN,
            ranks_per_node=parallel.part.ranks_per_node if parallel else UNKNOWN,
            machine=machine,
            trains=trains,
        )
        for placed in (*self.placed, *self.inner):
            for problem in self.listed(placed, "check", Problem, site):
                self.tell((*placed.path, *key_path(problem.where)), problem)
        stated: _Statements | None = None
        facts: Mapping[str, Any] = {}
        settled: dict[int, LayerAssembly] = {}
        depends_on_layer = True
        for layer in layers or [0]:
            here = site.at(layer)
            if depends_on_layer:
                watched = WatchedSite.of(here)
                before = stated
                stated = self._state(watched, layout)
                depends_on_layer = watched.layer_was_read
                if stated != before:
                    facts = self._settle(stated)
            settled[layer] = LayerAssembly(site=here, facts=facts)
        return site, settled if layers else {}

    def _state(self, here: Site, layout: LayoutPlan | None) -> _Statements:
        """Offers and needs of all parts at ``here``, and the offers of the layout and the machine."""
        promises: list[tuple[object, Offers]] = []
        heard = self.sections - self.unread
        unknown: set[str] = set()
        for placed in self.placed:
            answers = False
            with self.asking(placed.path, placed.part, "offers()"):
                own = with_update(placed.section, offers_of(placed.section, placed.part.offers(here)))
                stated = {**silence(placed.section), **own}
                known = {fact: value for fact, value in stated.items() if is_known(value)}
                for fact, value in known.items():
                    RULES[FACTS[fact].rule]([value], ())
                promises.append((placed, known))
                unknown |= stated.keys() - known.keys()
                answers = True
            if not answers:
                heard.discard(placed.section)
        if layout is None:
            heard.discard("parallel")
        else:
            promises.append(("the layout", offers(axis=tuple(layout.sizes), axis_divides=tuple(layout.sizes.items()))))
        demands: list[tuple[_Placed, Need]] = []
        packages: list[str] = []
        for placed in (*self.placed, *self.inner):
            needs = self.listed(placed, "needs", Need, here)
            if self.for_run and isinstance(placed.part, DataSourcePlugin):
                needs += self.listed(placed, "needs_to_train", Need, here)
            for need in filter(is_known, needs):
                with self.asking(placed.path, placed.part, "needs()"):
                    if need.fact == "package" and here.machine.has_package(need.value):
                        packages.append(need.value)
                    demands.append((placed, need))
        demands += self.graph_demands
        demands += self.update_demands
        capability = (here.machine.capability,) if here.machine.capability else ANY
        has = offers(device=(here.machine.device,), capability=capability, package=tuple(packages))
        promises.append((here.machine.name, has))
        unheard = {name for name, fact in FACTS.items() if not heard.issuperset(fact.offered_by)}
        return _Statements(promises, demands, unknown | unheard)

    def _settle(self, stated: _Statements) -> dict[str, Any]:
        """Return the facts, and report the misfits that no unknown offer could prevent."""
        try:
            facts, misfits = match(stated.promises, stated.demands)
        except Exception:  # a need has a value that its rule cannot take
            facts, misfits = match(stated.promises, self._sound_demands(stated))
        for misfit in misfits:
            if misfit.need.fact not in stated.unknown:
                self.tell((*misfit.asker.path, *key_path(misfit.need.option)), misfit.problem())
        return facts

    def _sound_demands(self, stated: _Statements) -> list[tuple[_Placed, Need]]:
        """Return the needs that can be matched alone, and report the fault of each other one."""
        demands = []
        for placed, need in stated.demands:
            with self.asking(placed.path, placed.part, "needs()"):
                match(_about(stated.promises, need.fact), [(placed, need)])
                demands.append((placed, need))
        return demands

    def parts(self) -> ChosenPlugins:
        """Parts by section."""
        single = {placed.section: placed.part for placed in self.placed if placed.section != "memory"}
        return ChosenPlugins(
            **single, memory=tuple(placed.part for placed in self.placed if placed.section == "memory")
        )


def _section(path: KeyPath) -> str:
    """Section of a path: its last name. A policy of a list is behind it."""
    return next(key for key in reversed(path) if isinstance(key, str))


def _about(promises: Sequence[tuple[object, Offers]], fact: str) -> Iterator[tuple[object, Offers]]:
    """Yield the offers of one fact."""
    return ((part, {fact: offered[fact]}) for part, offered in promises if fact in offered)


def _fault(error: Exception) -> Problem:
    """Problem of a method that raises."""
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return Problem(f"{what.rstrip(':.')}.", "This is a mistake in the plugin.")


def _of_kind(kind: type[A], answer: object) -> A:
    if not isinstance(answer, kind):
        raise TypeError(f"{show(answer)} is not a {kind.__name__}")
    return answer


def _moe_layers(model: ModelPlugin) -> list[int]:
    layers = list(islice(model.moe_layers(), MAX_LAYERS + 1))
    if len(layers) > MAX_LAYERS:
        raise PlanError(f"{model.name} has more than {MAX_LAYERS} MoE layers.", "Use fewer layers.")
    return layers
