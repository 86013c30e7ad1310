"""Text that the model generated at the end of the run."""

from __future__ import annotations

from collections.abc import Sequence

from moefw.report.blocks import Block, Preformatted, Section, Words, missing
from moefw.report.charts import Charts
from moefw.report.reading import Run


def section(runs: Sequence[Run], charts: Charts) -> Section:
    """The sample of each run."""
    blocks: list[Block] = []
    for run in runs:
        if len(runs) > 1:
            blocks.append(Words([run.name]))
        if run.sample is None:
            blocks.append(missing("There is no sample.", "A run that ends writes one; `moefw generate` makes others."))
        else:
            blocks.append(Preformatted(run.sample))
    return Section("sample", "Sample", blocks)
