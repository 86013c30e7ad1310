"""A page about runs: one HTML file that needs no other, with its style, its script and Bokeh's inside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from moefw.report.charts import Charts
from moefw.report.loads import num_windows
from moefw.report.reading import Run, cells, read_run
from moefw.report.rendering import rendered, write
from moefw.report.sections import sections_of
from moefw.report.words import several


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Write a page about the runs in these folders, which replaces an earlier one whole.

    Raises DataError if there is no run in a folder or a file of it is damaged, OSError if the page cannot be written.
    """
    write(page(read_runs(folders)), out)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Runs, of different names, with loads of their experts that all fit into one page."""
    most = max(map(cells, folders))
    runs = [read_run(folder, num_windows=num_windows(most, runs=len(folders))) for folder in folders]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    return runs


def page(runs: Sequence[Run]) -> str:
    """HTML of a page about runs."""
    charts = Charts(runs)
    return rendered(
        of="moefw report",
        title=several([run.name for run in runs]),
        about=_about(runs),
        sections=sections_of(runs, charts),
        pictures=charts.data(),
        origin=several([str(run.folder) for run in runs]),
    )


def _about(runs: Sequence[Run]) -> str:
    """The model and the ranks of one run, in a line; empty for several, which a table compares."""
    if len(runs) > 1:
        return ""
    (run,) = runs
    start = run.start
    model = run.setting("model") or {}
    parts = []
    kept = start.get("frozen_parameters")
    frozen = f", of which {kept / 1e6:,.1f} M are frozen" if isinstance(kept, int) and kept else ""
    if isinstance(start.get("parameters"), int):
        parts.append(f"{start['parameters'] / 1e6:,.1f} M parameters{frozen}")
    if model.get("num_experts") and model.get("top_k"):
        parts.append(f"{model['num_experts']} experts, top-{model['top_k']}")
    if isinstance(start.get("ranks"), int):
        parts.append("1 rank" if start["ranks"] == 1 else f"{start['ranks']} ranks")
    if run.first_time is not None:
        parts.append(f"begun {time.strftime('%Y-%m-%d at %H:%M', time.localtime(run.first_time))}")
    return " · ".join(parts)
