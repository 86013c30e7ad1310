"""Resolves a spec, registry and world to an assembly, or to every misfit with its reason. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs

from moefw.compose.advice import advised
from moefw.compose.assembly import Assembly
from moefw.compose.machine import this_machine
from moefw.compose.registry import Registry
from moefw.compose.resolution import checks
from moefw.compose.resolution.choosing import Choosing
from moefw.compose.resolution.chosen import Placed
from moefw.compose.resolution.matching import Matching, graph_demands, site_of, update_demands
from moefw.compose.resolution.problems import Problems
from moefw.compose.spec.origins import Origins
from moefw.compose.spec.sections import Spec, with_defaults
from moefw.compose.spec.source import Marks, Tree, key_path, read_spec_file
from moefw.compose.spec.structure import structure
from moefw.compose.spec.unknown import UNKNOWN, is_known
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import Problem
from moefw.core.site import Machine


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
    found: list[Problem] = []
    tree, marks = read_spec_file(path, overrides, found)
    return assemble_tree(
        tree,
        marks,
        found,
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
    found: Sequence[Problem] = (),
    *,
    defaults: Tree,
    registry: Registry | None = None,
    world: int | None = None,
    machine: Machine | Callable[[str], Machine] | None = None,
    trains: bool = True,
    for_run: bool = False,
    files_here: bool = False,
) -> Assembly:
    """Resolve a spec given as plain data, in which reading it has ``found`` these problems; see :func:`assemble`."""
    registry = registry or Registry()
    problems = Problems(registry, marks, found)
    choosing = Choosing(registry, problems)
    written = tree
    tree = with_defaults(choosing.with_preset(tree, defaults), defaults)
    spec = structure(Spec, tree, (), marks, problems.of_spec)
    assert spec is not None, "every section is a choice or has a default"
    chosen = choosing.choose(spec)
    advise = partial(advised, registry=registry, declarations=chosen.declarations, defaults=defaults)

    checks.check_regions(problems, chosen)
    checks.check_phases(problems, chosen, spec.train)
    checks.check_freeze(problems, chosen, spec.train)
    checks.check_clip(problems, chosen, spec.train)
    parallel = chosen.find("parallel")
    layout = _layout(problems, parallel, world)
    axes_of = layout
    if layout is None and world is not None and not problems.blames_a_plugin:
        # Ranks fill no layout. What its options say of axes, the same in any world, can be wrong besides.
        axes_of = _layout(problems, parallel, None)

    if not isinstance(machine, Machine):
        device = "auto" if spec.run is UNKNOWN or spec.run.device is UNKNOWN else spec.run.device
        machine = (machine or this_machine)(device)
    for_graphs = graph_demands(problems, spec.train, layout, trains=trains)
    demands = [*for_graphs, *update_demands(problems, chosen)]
    site, moe_layers = site_of(problems, chosen, layout, machine, trains=trains)
    layers = Matching(problems, chosen, axes_of, demands, for_run=for_run).match(site, moe_layers)

    if layout is not None:
        checks.check_batches(problems, chosen, layout, spec.train)
        checks.check_stages(problems, chosen, registry, layout, spec.train)
        if for_graphs:
            checks.check_graphs(problems, chosen, layout, spec.train, layers)
    elif axes_of is not None:
        checks.check_layers(problems, chosen, axes_of)
    if for_run:
        checks.check_routes(problems, chosen, spec)
    if files_here:
        checks.check_files(problems, chosen, spec)
    problems.raise_all(advise)

    assert layout is not None, "a layout that is missing is a problem"
    assembly = Assembly(
        spec=spec,
        parts=chosen.by_section(),
        layers=layers,
        site=site,
        registry=registry,
        origins=Origins(marks, written, chosen.presets),
    )
    spelled_out = structure(Spec, assembly.resolved(), (), marks, problems.of_spec)
    assembly = attrs.evolve(assembly, spec=spelled_out or spec)
    for problem in registry.problems(assembly):
        problems.tell(key_path(problem.where), problem)
    problems.raise_all(advise)
    return assembly


def _layout(problems: Problems, parallel: Placed | None, world: int | None) -> LayoutPlan | None:
    """Layout plan of a world, by default of the smallest that fits; None if there is none, or an option is unknown."""
    layout = problems.answer(parallel, "plan", LayoutPlan, world) if parallel else None  # type: ignore[type-abstract]
    return layout if layout is not None and is_known(layout.sizes) else None
