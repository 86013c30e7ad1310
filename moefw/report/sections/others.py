"""Numbers that no other section knows, such as those of plugins."""

from __future__ import annotations

from collections.abc import Sequence

from moefw.report.blocks import Block, Section
from moefw.report.charts import Charts
from moefw.report.reading import GROUPS, Run
from moefw.report.sections.curves_of_runs import curves_of, extremes
from moefw.report.sections.drops import COUNTS
from moefw.report.words import readable

KNOWN = {
    *("loss", "eval_loss", "eval_bits_per_byte", "lr", "grad_norm", "load_max_over_mean"),
    *("tokens_per_s", "model_tflops_per_gpu", "mfu"),
    *("loss_spikes", "skipped_steps", "rerun_steps"),
    *COUNTS,
}
MOST_PICTURES = 12
"""Number of curves that are drawn; a table has all."""


def section(runs: Sequence[Run], charts: Charts) -> Section | None:
    """Curves and a table of the other numbers of a line; None if there are none."""
    terms = {name.removeprefix("loss_shares/") for run in runs for name in run.buckets.names("loss_shares/")}
    names = {
        name: readable(name)
        for run in runs
        for name in run.buckets.names("")
        if "/" not in name and name not in KNOWN and name not in terms and name not in GROUPS
    }
    table = extremes(runs, names, "number")
    if table is None:
        return None
    blocks: list[Block] = [
        charts.curves(label, curves_of(runs, name, label), unit="", height=160)
        for name, label in list(names.items())[:MOST_PICTURES]
    ]
    return Section("others", "What else was recorded", [*blocks, table])
