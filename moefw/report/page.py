"""A page about runs: one HTML file that needs no other, with its style, its script and Bokeh's inside."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

import moefw
from moefw.report.charts import Charts
from moefw.report.loads import num_windows
from moefw.report.reading import Run, cells, read_run
from moefw.report.sections import sections_of
from moefw.report.words import several
from moefw.system.files import replaced_file

ASSETS = Path(__file__).parent / "assets"


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Write a page about the runs in these folders, which replaces an earlier one whole.

    Raises DataError if there is no run in a folder or a file of it is damaged, OSError if the page cannot be written.
    """
    text = page(read_runs(folders))
    with replaced_file(out) as scratch:
        scratch.write_text(text, encoding="utf-8")


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
    sections = sections_of(runs, charts)
    assets = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    bokeh, *_ = Resources(mode="inline", components=["bokeh"]).js_raw  # what follows sets a log level, and logs that
    return assets.get_template("page.html").render(
        title=several([run.name for run in runs]),
        about=_about(runs),
        sections=sections,
        style=Markup((ASSETS / "page.css").read_text(encoding="utf-8")),
        script=Markup((ASSETS / "page.js").read_text(encoding="utf-8")),
        bokeh=Markup(bokeh),
        pictures=_inside_a_script(charts.data()),
        folders=several([str(run.folder) for run in runs]),
        version=moefw.__version__,
        written=time.strftime("%Y-%m-%d at %H:%M:%S"),
    )


def _inside_a_script(data: object) -> Markup:
    """JSON that cannot end the script element around it: it has no ``<``."""
    return Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


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
