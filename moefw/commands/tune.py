"""``moefw tune``: the layouts, schedules and policies with which a spec trains fastest on a cluster, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from attrs import evolve
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from ruamel.yaml import YAML

from moefw.commands.plan import PLANS, SKEW
from moefw.commands.tables import print_table
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Tree, read_spec_file
from moefw.compose.spec.structure import plain
from moefw.core.errors import MoefwError, Problem, SpecError, os_reason
from moefw.planner import Ledger, ledger
from moefw.planner import cluster as clusters
from moefw.planner.sheets import GIB
from moefw.planner.skew import EVEN
from moefw.planner.time import software
from moefw.planner.time.forecast import Forecast
from moefw.planner.time.likeness import error_of_ratio, held_out
from moefw.planner.time.nodes import ranks_of_node
from moefw.planner.tune.candidates import Candidate
from moefw.planner.tune.excerpts import Excerpts, Resolve
from moefw.planner.tune.ranking import error_percent, fastest_of, percent_below_ties, tied
from moefw.planner.tune.reasons import impossible, reasons
from moefw.planner.tune.search import Search, Where
from moefw.planner.tune.settings import Settings, with_settings
from moefw.planner.tune.space import BY_DEFAULT, NAMES, space_of
from moefw.system.folders import cache_dir

EXCERPTS = "excerpts"
"""The folder of excerpts in the cache."""
SHOWN = 10
"""Candidates of the tied group that are printed."""
CANDIDATES = 200
RANKS_PER_NODE = ("parallel", "ranks_per_node")


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--cluster", required=True, metavar="NAME|FILE.yaml", help="Cluster to run on.")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs; by default the fewest that SPEC's own layout fits.")
@click.option(
    "--candidates", type=click.IntRange(min=1), default=CANDIDATES, show_default=True, help="Most to look at."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@click.option("--vary", multiple=True, type=click.Choice(NAMES), help="Vary this alone; may be given several times.")
@click.option("--keep", multiple=True, type=click.Choice(NAMES), help="Keep this as SPEC has it.")
@click.option("--as", "runs_as", metavar="NAME|FILE.yaml", help="Predict the time of other software.")
@SKEW
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE.yaml", help="Write the best spec.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def tune(
    spec: str,
    overrides: tuple[str, ...],
    cluster: str,
    gpus: int | None,
    candidates: int,
    seed: int,
    vary: tuple[str, ...],
    keep: tuple[str, ...],
    runs_as: str | None,
    skew: float,
    output: Path | None,
    as_json: bool,
) -> int:
    """Search for what makes SPEC train fastest on a cluster, and say why the rest loses. Needs no GPU.

    Layouts, sharding, schedules, micro-batches, exact memory policies and dispatchers vary; with --vary precision also
    formats and policies that change what is computed. Exits with 2 if nothing fits.
    """
    try:
        runs = software.Software() if runs_as is None else software.read(runs_as)
        where = _where(cluster, runs)
        problems: list[Problem] = []
        tree, marks = read_spec_file(Path(spec), overrides, problems)
        registry = Registry()

        def resolve(settings: Settings, world: int | None) -> Assembly:
            changed = with_settings(tree, settings)
            return assemble_tree(
                changed,
                marks,
                problems,
                defaults=defaults(),
                registry=registry,
                world=world,
                machine=where.machine,
                for_run=True,
            )

        own, refused = _own(resolve, gpus)
        registry.load_all()
        where = evolve(where, world=gpus or own.layout.world)
        stays = _nodes(own, where)
        space = space_of(own, registry.parts(), vary or BY_DEFAULT, stays, keep, world=where.world)
        if any(axis.kind == "schedule" for axis in space.axes):
            # Each schedule has its own overlap, whatever the software is set to.
            where = evolve(where, runs=evolve(where.runs, ep_overlap=None))
        excerpts = Excerpts(resolve, cache_dir() / EXCERPTS, skew if skew > EVEN else None)
        with _progress(candidates) as said:
            search = Search(space, where, resolve, excerpts, said)
            search.run(candidates, seed)
            if refused is not None and not search.candidates:
                raise refused
            best, time, lines = _recommended(search)
    except MoefwError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": plain(error.problems)}))
        return 2
    changed = {path: value for path, value in best.settings.items() if space.own.get(path) != value}
    if output is not None:
        _write(output, with_settings(tree, changed), best, where, time, lines)
    group = tied(search.candidates)
    if as_json:
        click.echo(json.dumps(_data(search, best, time, group, lines, with_settings(tree, changed))))
        return 0
    _show(search, best, time, group, lines)
    if output is not None:
        click.echo(f"\nthe best spec is written to {output}")
    return 0


def _where(cluster: str, runs: software.Software) -> Where:
    """Where candidates run, on one GPU yet. Raises SpecError for a cluster that cannot be read."""
    return Where(world=1, cluster=clusters.read(cluster), name=Path(cluster).stem, runs=runs)


def _own(resolve: Resolve, gpus: int | None) -> tuple[Assembly, MoefwError | None]:
    """The spec itself on so many GPUs; if they refuse it, on the fewest that its layout fits, and the refusal.

    Raises MoefwError if the spec is refused there, too.
    """
    try:
        return resolve({}, gpus), None
    except MoefwError as error:
        refused = error
    if gpus is None:
        raise refused
    try:
        return resolve({}, None), refused
    except MoefwError:
        raise refused from None


def _nodes(own: Assembly, where: Where) -> Settings:
    """Ranks of a node, where the spec leaves them to the launcher and they are not all in one."""
    ranks = ranks_of_node(own, where.cluster, where.world)
    return {} if ranks is None else {RANKS_PER_NODE: ranks}


@contextmanager
def _progress(count: int) -> Iterator[Any]:
    """Show how many candidates are known, on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("candidates"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=count)
        yield lambda _: progress.advance(task)


def _recommended(search: Search) -> tuple[Candidate, Forecast, Sequence[str]]:
    """Best candidate, its forecast, and why others lose, for which more are looked at: one may be better.

    Then that is looked at in turn. Raises PlanError if nothing fits.
    """
    while True:
        best, time = _planned(search)
        lines = [*reasons(search, best)]
        if tied(search.candidates)[0] is best:
            return best, time, lines


def _planned(search: Search) -> tuple[Candidate, Forecast]:
    """First of the tied group that is still the first when it is planned whole. Raises PlanError if there is none."""

    def planned_whole(assembly: Assembly) -> Ledger:
        return ledger(assembly, cache=cache_dir() / PLANS, skew=search.excerpts.skew)

    while group := tied(search.candidates):
        best, time = search.exact(group[0], planned_whole)
        if time is not None and next(iter(tied(search.candidates)), None) is best:
            return best, time
    raise impossible(search)


def _data(
    search: Search, best: Candidate, time: Forecast, group: Sequence[Candidate], lines: Sequence[str], spec: Tree
) -> dict[str, Any]:
    return {
        "ok": True,
        "problems": [],
        "counts": search.counts,
        **({} if search.excerpts.skew is None else {"skew": search.excerpts.skew}),
        "error_of_ratio_percent": 100 * error_of_ratio(held_out()).share,
        "best": {**best.to_data(), "time": time.to_data()},
        "own": {**search.own.to_data(), **_beside(search.own, best, group)},
        "tied": [candidate.to_data() for candidate in group],
        "reasons": list(lines),
        "spec": spec,
    }


def _beside(own: Candidate, best: Candidate, group: Sequence[Candidate]) -> dict[str, float | None]:
    """How a spec as it is compares with the best and with the tied group; None: its time is unknown."""
    if own.step is None:
        return {"error_of_ratio_percent": None, "below_tied_percent": None}
    below = percent_below_ties(own, fastest_of(group))
    return {"error_of_ratio_percent": error_percent(own, best), "below_tied_percent": max(0.0, below)}


def _show(search: Search, best: Candidate, time: Forecast, group: Sequence[Candidate], lines: Sequence[str]) -> None:
    """Print the tied group, what the best is, and why the rest loses."""
    fastest_s = fastest_of(group).step_s
    others = [candidate for candidate in group if candidate.settings != best.settings]
    rows = [
        (
            f"{candidate.step_s:.4g}",
            f"{100 * (candidate.step_s / fastest_s - 1):.1f}",
            f"{candidate.tokens_per_s_per_gpu:.0f}",
            f"{(candidate.left_bytes or 0) / GIB:.1f}",
            candidate.label,
        )
        for candidate in (best, *others[: SHOWN - 1])
    ]
    head = ("step s", "% slower", "tokens/s a GPU", "GiB left", "settings")
    print_table(Console(markup=False, highlight=False), head, rows)
    error = (
        "within the error of a ratio of the fastest, which is "
        f"{100 * error_of_ratio(held_out()).share:.0f} %, and more if it alone is unlike published rows"
    )
    if len(group) == 1:
        click.echo(f"\nno other candidate is {error}")
    else:
        click.echo(
            f"\n{len(group)} candidates are {error}: they are tied, and in the order of memory left, then simplicity"
        )
    click.echo(
        f"the first, planned whole: a step takes {time.step.step_s:.4g} s, give or take {time.bar.percent:.0f} %: "
        f"{time.model_tflops_per_gpu:.0f} TFLOPS a GPU, {time.step.bound_by} take longest"
    )
    skew = search.excerpts.skew
    if skew is not None:
        click.echo(
            f"a rank has up to {skew:g} times the mean of rows: what fits, and how long a step takes, is of that one"
        )
    own = search.own
    if own.problems:
        click.echo(f"SPEC as it is, is no candidate: {' '.join(own.problems)}")
    if own.step is not None:
        fits = "" if own.fits else f", and does not fit: {-(own.left_bytes or 0) / GIB:.1f} GiB are missing"
        click.echo(f"SPEC as it is takes {own.step_s:.4g} s, {100 * (own.step_s / best.step_s - 1):+.1f} %{fits}")
    click.echo(", ".join(f"{name}: {number}" for name, number in search.counts.items()))
    if lines:
        click.echo("\nwhy others lose")
        for line in lines:
            click.echo(f"  {line}")


def _write(path: Path, tree: Tree, best: Candidate, where: Where, time: Forecast, lines: Sequence[str]) -> None:
    """Write the best spec, with why it is the best."""
    about = [
        f"Found by moefw tune for {where.world} GPUs of {where.name}: {best.label}.",
        f"Predicted: a step takes {time.step.step_s:.4g} s, give or take {time.bar.percent:.0f} %.",
        *lines,
    ]
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"# {line}\n" for line in about)
            yaml = YAML(typ="safe", pure=True)
            yaml.default_flow_style = False
            yaml.dump(tree, file)
    except OSError as error:
        raise SpecError(f"--output {path}: {os_reason(error)}.", "Name a file that can be written.") from error
