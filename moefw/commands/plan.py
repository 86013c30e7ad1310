"""``moefw plan``: the predicted memory and work of a rank, from the spec alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moefw.commands import specs
from moefw.commands.waiting import waiting
from moefw.compose.assembly import Assembly
from moefw.compose.registry import Registry
from moefw.compose.spec.structure import plain
from moefw.core.errors import MoefwError, SpecError, os_reason
from moefw.planner.prediction import Circumstances, Prediction, predict
from moefw.planner.skew import EVEN
from moefw.system.folders import cache_dir

if TYPE_CHECKING:
    from moefw.planner.comparison import Comparison

PLANS = "plans"
"""The folder of ledgers in the cache."""


def _number(_: click.Context, __: click.Parameter, value: float) -> float:
    """The value. Raises click.BadParameter if it is no number, which lies in any range."""
    if isnan(value):
        raise click.BadParameter("it is no number.")
    return value


def _finite(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """The value, if there is one. Raises click.BadParameter for infinity and for what is no number."""
    if value is not None and not isfinite(value):
        raise click.BadParameter(f"{value} is no finite number.")
    return value


SKEW = click.option(
    "--skew",
    type=click.FloatRange(min=1.0, max=1000.0),
    callback=_number,
    default=EVEN,
    help="Rows of the rank with most, beside the mean: tell its memory, and wait for it; 1, the default, is even.",
)
"""The option of commands that predict a step."""


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--world", type=click.IntRange(min=1), help="Ranks to lay out over; by default the smallest that fits.")
@click.option(
    "--cluster", metavar="NAME|FILE.yaml", help="Say how long a step takes, and whether the peak fits a GPU there."
)
@click.option(
    "--tokens",
    type=click.FloatRange(min=0.0, min_open=True),
    callback=_finite,
    metavar="NUMBER",
    help="Say what this many tokens, such as 1e12, take of GPU-hours and cost on the cluster.",
)
@click.option(
    "--tokens-per-s-per-gpu",
    type=click.FloatRange(min=0.0, min_open=True),
    callback=_finite,
    metavar="NUMBER",
    help="The speed of --tokens, of a run like this one, instead of the predicted one.",
)
@click.option(
    "--as",
    "runs_as",
    metavar="NAME|FILE.yaml",
    help="Predict the time of other software: an implementation, or a file.",
)
@SKEW
@click.option(
    "--compare",
    multiple=True,
    metavar="FILE.yaml|KEY=VALUE",
    help="Tell the plan beside that of another spec, or of this one with another value; may be given several times.",
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE.html", help="Write a page about it, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--picture", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw the schedule of a step, instead."
)
def plan(
    spec: str,
    overrides: tuple[str, ...],
    world: int | None,
    cluster: str | None,
    tokens: float | None,
    tokens_per_s_per_gpu: float | None,
    runs_as: str | None,
    skew: float,
    compare: tuple[str, ...],
    html: Path | None,
    as_json: bool,
    picture: Path | None,
) -> int:
    """Predict the memory and the work of a rank that trains as SPEC says, without a GPU.

    Memory is told by category and by region; --json tells the work by region, too. With --cluster, the time of a step
    is told by what it is spent on, and what to try against that.

    Problems that `moefw check` would report are printed instead: exits with 2 then.
    """
    if tokens_per_s_per_gpu is not None and tokens is None:
        raise click.UsageError("--tokens-per-s-per-gpu is the speed of --tokens, which is not there.")
    if compare and (tokens is not None or picture is not None):
        raise click.UsageError("--compare tells two plans, and neither --tokens nor --picture.")
    told: Prediction | Comparison
    try:
        circumstances = Circumstances.read(cluster, runs_as, skew)
        if picture is not None:
            return _draw(specs.read(spec, overrides, world), picture)
        if compare:
            told = _compared(spec, overrides, compare, world, circumstances)
        else:
            told = _predicted(spec, overrides, world, circumstances)
            registry = Registry()
            told = told.with_advice(
                lambda more: _read(spec, [*overrides, *more], world, circumstances, registry=registry)
            )
            told = told if tokens is None else told.with_budget(tokens, tokens_per_s_per_gpu)
        if html is not None:
            _write_page(told, shlex.join([spec, *overrides]), html)
    except MoefwError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": plain(error.problems)}))
        return 2
    if as_json:
        click.echo(json.dumps({"ok": True, "problems": [], **told.to_data()}))
    else:
        _show(told)
    if html is not None and not as_json:
        click.echo(f"\nthe page is in {html}")
    return 0


def _show(told: Prediction | Comparison) -> None:
    """Print tables."""
    from moefw.commands.plan_tables import show_comparison, show_prediction

    if isinstance(told, Prediction):
        show_prediction(told)
    else:
        show_comparison(told)


def _read(
    spec: str,
    overrides: Sequence[str],
    world: int | None,
    circumstances: Circumstances,
    *,
    registry: Registry | None = None,
) -> Assembly:
    """Assembly of a spec on the cluster's GPUs, and on its nodes if the spec leaves them to the launcher."""

    def read(*more: str) -> Assembly:
        return specs.read(spec, [*overrides, *more], world, registry=registry, machine=circumstances.machine)

    assembly = read()
    ranks = circumstances.ranks_of_node(assembly)
    return assembly if ranks is None else read(f"parallel.ranks_per_node={ranks}")


def _predicted(spec: str, overrides: Sequence[str], world: int | None, circumstances: Circumstances) -> Prediction:
    """Prediction of a spec."""
    assembly = _read(spec, overrides, world, circumstances)
    with waiting("running a step of a rank on tensors without memory"):
        return predict(assembly, circumstances, cache_dir() / PLANS)


def _compared(
    spec: str, overrides: Sequence[str], compare: Sequence[str], world: int | None, circumstances: Circumstances
) -> Comparison:
    """Prediction of a spec beside that of another, or of the same with other values, or of another with other values.

    Overrides are of both.
    """
    from moefw.planner.comparison import Comparison

    files = [each for each in compare if "=" not in each or Path(each).is_file()]
    if len(files) > 1:
        raise SpecError(f"--compare: {' and '.join(files)} are two specs.", "Compare with one spec, and key=value.")
    other = files[0] if files else spec
    changes = [each for each in compare if each not in files]
    return Comparison(
        asked=(shlex.join([spec, *overrides]), shlex.join([other, *overrides, *changes])),
        predictions=(
            _predicted(spec, overrides, world, circumstances),
            _predicted(other, [*overrides, *changes], world, circumstances),
        ),
    )


def _write_page(told: Prediction | Comparison, origin: str, out: Path) -> None:
    """Write the page of a plan, or of two. Raises SpecError if it cannot be written."""
    from moefw.report.plan_page import comparison_page, plan_page
    from moefw.report.rendering import write

    page = plan_page(told, origin) if isinstance(told, Prediction) else comparison_page(told)
    try:
        write(page, out)
    except OSError as error:
        raise SpecError(f"--html {out}: {os_reason(error)}.", "Name a file that can be written.") from error


def _draw(assembly: Assembly, picture: Path) -> int:
    """Draw the schedule of a step."""
    from moefw.planner.schedule_picture import draw_schedule

    if picture.suffix != ".png":
        raise SpecError(f"--picture {picture}: a picture ends in .png.", f"Use {picture.with_suffix('.png')}.")
    try:
        draw_schedule(assembly, picture)
    except OSError as error:
        reason = os_reason(error)
        raise SpecError(f"--picture {picture}: {reason}.", "Name a file that can be written.") from error
    click.echo(f"the schedule is drawn in {picture}")
    return 0
