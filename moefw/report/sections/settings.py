"""The resolved spec: every value, where it came from, and which differ from the defaults."""

from __future__ import annotations

from collections.abc import Sequence

from moefw.compose.spec.leaves import leaves, shown
from moefw.report.blocks import Block, Section, Table, Words, missing
from moefw.report.charts import Charts
from moefw.report.reading import Run

DEFAULT = "default"


def section(runs: Sequence[Run], charts: Charts) -> Section:
    """Values that somebody chose, and then all."""
    blocks: list[Block] = []
    for run in runs:
        blocks += _of_run(run, "" if len(runs) == 1 else f", {run.name}")
    return Section("spec", "Spec", blocks)


def _of_run(run: Run, of_run: str) -> list[Block]:
    if not run.spec:
        return [missing(f"There is no spec.yaml{of_run}.", "A run writes it when it starts.")]
    values = leaves(run.spec)
    rows = [[key, shown(value), run.origins.get(key, "")] for key, value in values.items()]
    if not run.origins:
        note = missing(f"Where values came from was not recorded{of_run}.", "Runs of this version write origins.json.")
        return [
            note,
            Table(
                title=f"All values{of_run}",
                head=["key", "value"],
                rows=[row[:2] for row in rows],
                texts=(0, 1),
                visible=0,
            ),
        ]
    chosen = [row for row in rows if row[2] not in (DEFAULT, "")]
    head = ["key", "value", "from"]
    blocks: list[Block] = [Table(title=f"Not the default{of_run}", head=head, rows=chosen, texts=(0, 1, 2), visible=40)]
    if not chosen:
        blocks = [Words([f"Every value is the default{of_run}."])]
    return [*blocks, Table(title=f"All values{of_run}", head=head, rows=rows, texts=(0, 1, 2), visible=0)]
