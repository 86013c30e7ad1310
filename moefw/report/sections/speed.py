"""Tokens a second, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence

from moefw.report.blocks import Block, Section, Table, missing
from moefw.report.charts import Charts, Curve
from moefw.report.reading import Run
from moefw.report.sections.curves_of_runs import curves_of, extremes, marks, series
from moefw.report.sections.outcome import section_means
from moefw.report.words import duration, readable, share


def speed(runs: Sequence[Run], charts: Charts) -> Section:
    """Tokens a second over steps, and model TFLOPS and MFU where they are known."""
    curves = curves_of(runs, "tokens_per_s", "tokens a second")
    if not curves:
        return Section(
            "speed", "Speed", [missing("No speed was recorded.", "Runs of this version record tokens_per_s.")]
        )
    picture = charts.curves("Tokens", curves, unit="a second", marks=marks(runs), from_zero=True)
    pictures = [picture]
    flops = curves_of(runs, "model_tflops_per_gpu", "model TFLOPS a rank")
    if flops:
        pictures.append(charts.curves("Model TFLOPS", flops, unit="a rank", marks=marks(runs), from_zero=True))
    told = {"tokens_per_s": "tokens a second", "model_tflops_per_gpu": "model TFLOPS a rank", "mfu": "MFU"}
    table = extremes(runs, told, "")
    return Section("speed", "Speed", [*pictures, *([table] if table else [])])


def step_time(runs: Sequence[Run], charts: Charts) -> Section:
    """Seconds of a step by section. Evaluations and checkpoints are not part of a step."""
    blocks: list[Block] = []
    means = {run.name: section_means(run) for run in runs}
    names = list(dict.fromkeys(name for of_run in means.values() for name in of_run))
    if not names:
        how = "Runs of this version record the seconds of each section of a step."
        return Section("step-time", "Time of a step", [missing("No time by section was recorded.", how)])
    if len(runs) == 1:
        (run,) = runs
        curves = [Curve(run, f"seconds/{name}", readable(name), series(place)) for place, name in enumerate(names)]
        blocks.append(charts.stack("Time of a step", curves, unit="seconds, the mean where steps are drawn together"))
    totals = {name: sum(of_run.values()) for name, of_run in means.items()}
    rows = []
    for name in names:
        cells = []
        for run in runs:
            seconds = means[run.name].get(name)
            cells += [duration(seconds), share(None if seconds is None else seconds / totals[run.name])]
        rows.append([readable(name), *cells])
    rows.append(["step", *(cell for run in runs for cell in (duration(totals[run.name] or None), ""))])
    columns = ["mean", "share"] if len(runs) == 1 else [head for run in runs for head in (run.name, "share")]
    return Section("step-time", "Time of a step", [*blocks, Table(title="", head=["section", *columns], rows=rows)])
