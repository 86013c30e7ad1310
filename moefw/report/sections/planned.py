"""The plan of a step on the machine of a run, beside what the run did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen

from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import MoefwError, PlanError
from moefw.planner import Ledger
from moefw.planner import cluster as clusters
from moefw.planner.time.forecast import Forecast, forecast, lacks
from moefw.planner.time.software import Software
from moefw.report.blocks import Block, Section, Table, Words, bars, missing
from moefw.report.charts import Charts
from moefw.report.reading import Run
from moefw.report.sections.outcome import OF_PROCESS, measured_peak, planned_peak
from moefw.report.words import UNKNOWN, duration, number, several, share, size


@frozen
class Steps:
    """The median of a run's steps. None: unknown."""

    tokens_per_s: float
    model_tflops: float | None
    """Of a rank."""
    mfu: float | None


def section(runs: Sequence[Run], charts: Charts) -> Section | None:
    """The time of a step by plan and by clock, run by run; None if no run has a plan and a speed."""
    blocks: list[Block] = []
    for run in runs:
        speed = _median(run, "tokens_per_s")
        if speed is None or not isinstance(run.ledger.get("predicted"), dict):
            continue
        steps = Steps(speed, _median(run, "model_tflops_per_gpu"), _median(run, "mfu"))
        blocks += _of_run(run, steps, "" if len(runs) == 1 else f", {run.name}")
    return Section("planned", "Plan beside reality", blocks) if blocks else None


def _median(run: Run, name: str) -> float | None:
    """Median of a curve: the first steps, which tune and allocate, do not count for much."""
    if run.buckets.get(name) is None:
        return None
    return float(np.nanmedian(run.buckets.columns(name)["mean"]))


def _of_run(run: Run, steps: Steps, of_run: str) -> list[Block]:
    try:
        planned = _forecast(run)
    except (MoefwError, KeyError, TypeError) as error:  # KeyError, TypeError: the ledger is of another version
        reason = str(error) if isinstance(error, MoefwError) else "its plan is of another version of moefw."
        return [missing(f"The time of a step is not planned{of_run}:", reason)]
    step = planned.step
    step_s = planned.tokens / steps.tokens_per_s
    rows = [
        _row("time", duration, step.step_s, step_s),
        _row("tokens a second", number, planned.tokens / step.step_s, steps.tokens_per_s),
        _row("model TFLOPS a rank", number, planned.model_tflops_per_gpu, steps.model_tflops),
        _row("MFU", share, planned.mfu, steps.mfu),
    ]
    peak = measured_peak(run)
    if peak is not None and peak[1] != OF_PROCESS:  # a process holds what no plan has
        rows.append(_row("peak memory of a rank", size, planned_peak(run), peak[0]))
    head = ["", "planned", "measured", "measured / planned"]
    table = Table(title=f"The median step{of_run}", head=head, rows=rows)
    return [
        table,
        Words([_how_sure(planned)], quiet=True),
        bars(f"A step is planned to spend, in part side by side{of_run}", step.longest_first, duration),
    ]


def _row(name: str, words: Callable[[float | None], str], planned: float | None, measured: float | None) -> list[str]:
    ratio = UNKNOWN if not planned or measured is None else number(measured / planned, 3)
    return [name, words(planned), words(measured), ratio]


def _how_sure(planned: Forecast) -> str:
    bar = planned.bar
    sure = f"The planned time is right within {bar.percent:.0f} % in four of five published runs like this one."
    if bar.checked:
        of_steps = f"{bar.checked} small steps that were measured when the machine was calibrated"
        sure = f"The planned time is right within {bar.percent:.0f} %, by the errors of {of_steps}."
    if not bar.extrapolated:
        return sure
    return f"{sure} {bar.nothing_near.capitalize()} {several(bar.extrapolated)}."


def _forecast(run: Run) -> Forecast:
    """Forecast of a run on the cluster that has what its ranks computed on. Raises MoefwError if there is none."""
    computes_on = str((run.start.get("machine") or {}).get("computes_on", "what ranks of older runs computed on"))
    found = next(clusters.with_gpu(computes_on), None)
    if found is None:
        fix = "`moefw bench calibrate` writes the cluster of a machine."
        raise PlanError(f"no cluster has {computes_on}.", fix)
    name, cluster = found
    plan = Ledger.of_data(run.ledger["predicted"])
    lacking = lacks(cluster, plan)
    if lacking:
        raise PlanError(f"the cluster {name} has no {several(lacking)}.", "Calibrate the machine again.")
    assembly = assemble_tree(run.spec, Marks("spec.yaml"), defaults=defaults(), world=plan.world)
    return forecast(assembly, plan, cluster, name, Software())
