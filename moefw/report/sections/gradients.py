"""Norms of the gradient, whole and by part."""

from __future__ import annotations

from collections.abc import Sequence

from moefw.report.blocks import Block, Section, missing
from moefw.report.charts import Charts, Curve
from moefw.report.reading import Run
from moefw.report.sections.curves_of_runs import curves_of, extremes, marks, series
from moefw.report.words import readable


def section(runs: Sequence[Run], charts: Charts) -> Section:
    """Norms before clipping, over steps."""
    blocks: list[Block] = []
    whole = curves_of(runs, "grad_norm", "all")
    if whole:
        blocks.append(charts.curves("Gradient norm", whole, unit="before clipping", marks=marks(runs), log=True))
    else:
        blocks.append(missing("No gradient norm was recorded.", "Runs of this version record grad_norm."))
    parts = {
        name: readable(name.removeprefix("grad_norms/")) for run in runs for name in run.buckets.names("grad_norms/")
    }
    if not parts:
        blocks.append(missing("No norms by part were recorded.", "Runs of this version record grad_norms."))
    elif len(runs) == 1:
        curves = [Curve(runs[0], name, label, series(place)) for place, (name, label) in enumerate(parts.items())]
        blocks.append(
            charts.curves(
                "By part", curves, unit="their squares add up to that of the norm", marks=marks(runs), log=True
            )
        )
    table = extremes(runs, {"grad_norm": "all", **parts}, "norm of")
    return Section("gradients", "Gradient norms", [*blocks, *([table] if table else [])])
