"""Choices and rows that were dropped, and budgets that were exceeded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moefw.report.blocks import Block, Section, missing
from moefw.report.charts import Charts, Curve
from moefw.report.reading import Run
from moefw.report.sections.curves_of_runs import curves_of, extremes, marks, series

COUNTS: Final = {
    "dropped_choices": "choices dropped by a router's capacity",
    "dropped_rows": "rows dropped by a dispatcher's budget",
    "overflow": "rows beyond a dispatcher's budget; the step ran again",
    "unsaved_rows": "rows beyond a stash's budget; the step ran again",
}
"""The counts of a line, summed over layers and ranks."""


def section(runs: Sequence[Run], charts: Charts) -> Section:
    """Counts of a step over the run."""
    recorded = {name: label for name, label in COUNTS.items() if any(run.buckets.get(name) for run in runs)}
    if not recorded:
        how = "Only routing.capacity, dispatch.rank_capacity and a stash's budget drop any, and count them."
        return Section("drops", "Drops and overflows", [missing("There was nothing to drop.", how)])
    blocks: list[Block] = []
    if len(runs) == 1:
        curves = [Curve(runs[0], name, label, series(place)) for place, (name, label) in enumerate(recorded.items())]
        blocks.append(
            charts.curves(
                "Drops and overflows", curves, unit="in a step", marks=marks(runs), from_zero=True, height=200
            )
        )
    else:
        for name, label in recorded.items():
            curves = curves_of(runs, name, label)
            blocks.append(charts.curves(label.capitalize(), curves, unit="in a step", from_zero=True, height=180))
    table = extremes(runs, recorded, "in a step")
    return Section("drops", "Drops and overflows", [*blocks, *([table] if table else [])])
