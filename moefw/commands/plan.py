"""``moefw plan``: the predicted memory and work of a rank, from the spec alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from moefw.commands import specs
from moefw.commands.plan_tables import show, show_advice, show_on_cluster
from moefw.commands.waiting import waiting
from moefw.compose.assembly import Assembly
from moefw.compose.spec.structure import plain
from moefw.core.errors import MoefwError, SpecError, os_reason
from moefw.planner.budget import Budget
from moefw.planner.prediction import Circumstances, Prediction, predict
from moefw.planner.time.advice import Advice, advice
from moefw.system.folders import cache_dir

PLANS = "plans"
"""The folder of ledgers in the cache."""


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
    metavar="NUMBER",
    help="Say what this many tokens, such as 1e12, take of GPU-hours and cost on the cluster.",
)
@click.option(
    "--tokens-per-s-per-gpu",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="NUMBER",
    help="The speed of --tokens, of a run like this one, instead of the predicted one.",
)
@click.option(
    "--as",
    "runs_as",
    metavar="NAME|FILE.yaml",
    help="Predict the time of other software: an implementation, or a file.",
)
@click.option(
    "--skew",
    type=click.FloatRange(min=1.0),
    default=1.0,
    help="Rows of the rank with most, beside the mean; 1, the default, is forced balance.",
)
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
    try:
        circumstances = Circumstances.read(cluster, runs_as, skew)
        assembly = specs.read(spec, overrides, world)
        if picture is not None:
            return _draw(assembly, picture)
        with waiting("running a step of a rank on tensors without memory"):
            prediction = predict(assembly, circumstances, cache_dir() / PLANS)
            found = _advice(prediction, lambda more: specs.read(spec, [*overrides, *more], world))
        budget = None if tokens is None else _budget(prediction, tokens, tokens_per_s_per_gpu)
    except MoefwError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": plain(error.problems)}))
        return 2
    if as_json:
        data: dict[str, Any] = {"ok": True, "problems": [], **prediction.to_data()}
        if prediction.time is not None:
            data["try"] = [each.to_data() for each in found]
        if budget is not None:
            data["budget"] = budget.to_data()
        click.echo(json.dumps(data))
        return 0
    show(prediction.plan)
    show_on_cluster(prediction)
    show_advice(found)
    if budget is not None:
        click.echo(f"\n{budget.in_words()}")
    return 0


def _advice(prediction: Prediction, assemble: Callable[[Sequence[str]], Assembly]) -> tuple[Advice, ...]:
    """What to try, where the time of a step is known."""
    if prediction.time is None:
        return ()
    return advice(prediction.time, prediction.assembly, assemble)


def _budget(prediction: Prediction, tokens: float, tokens_per_s_per_gpu: float | None) -> Budget:
    """What tokens cost at a speed; None: the predicted one. Raises SpecError if there is none."""
    cluster = prediction.circumstances.cluster
    if tokens_per_s_per_gpu is None:
        if prediction.time is None:
            what = "--tokens: their speed is unknown, without a time of a step."
            fix = "Add --cluster NAME, or --tokens-per-s-per-gpu: a run's tokens_per_s, over its ranks."
            raise SpecError(what, fix)
        tokens_per_s_per_gpu = prediction.time.tokens_per_s_per_gpu
    return Budget(
        tokens=tokens,
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        gpus=prediction.assembly.layout.world,
        usd_per_gpu_hour=None if cluster is None else cluster.usd_per_gpu_hour,
    )


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
