"""What the sections with curves share: labels and colours of one run or several, and the steps to mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moefw.report.blocks import Table
from moefw.report.charts import ACCENT, SERIES, Curve
from moefw.report.reading import Run
from moefw.report.words import number

MARKED = ("resume", "loss_spike", "skipped_step", "rerun_step")
"""The events with a line in the pictures of a run."""


def series(place: int) -> str:
    """Role of the colour of a curve by its place among several."""
    return SERIES[place % len(SERIES)]


def role_of(run: Run, runs: Sequence[Run]) -> str:
    """Role of the colour of a run."""
    return ACCENT if len(runs) == 1 else series(list(runs).index(run))


def curves_of(runs: Sequence[Run], name: str, label: str) -> list[Curve]:
    """A curve of each run that has it, labelled by the run where there are several."""
    return [
        Curve(run, name, label if len(runs) == 1 else run.name, role_of(run, runs))
        for run in runs
        if run.buckets.get(name)
    ]


def marks(runs: Sequence[Run]) -> list[int]:
    """Steps to mark in the pictures of one run; of several runs none."""
    return sorted({event["step"] for kind in MARKED for event in runs[0].of(kind)}) if len(runs) == 1 else []


def extremes(runs: Sequence[Run], names: Mapping[str, str], what: str, *, title: str = "") -> Table | None:
    """Last value, mean, least and most of curves, ``names`` with their labels, and the steps of the last two.

    None if no run has any of them.
    """
    rows = []
    for run in runs:
        for name, label in names.items():
            curve = run.buckets.get(name)
            if curve is not None:
                (low, low_step), (high, high_step) = curve.lowest, curve.highest
                values = [
                    number(curve.last),
                    number(curve.mean),
                    number(low),
                    f"{low_step:,}",
                    number(high),
                    f"{high_step:,}",
                ]
                rows.append([*([run.name] if len(runs) > 1 else []), label, *values])
    if not rows:
        return None
    head = [what, "last", "mean", "least", "in step", "most", "in step"]
    return Table(
        title=title,
        head=["run", *head] if len(runs) > 1 else head,
        rows=rows,
        texts=(0, 1) if len(runs) > 1 else (0,),
    )
