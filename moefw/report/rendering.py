"""HTML of sections: one file that needs no other, with its style and, where it has pictures, its script and Bokeh's."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

import moefw
from moefw.report.blocks import Section
from moefw.system.files import replaced_file

ASSETS = Path(__file__).parent / "assets"


def rendered(
    *,
    of: str,
    title: str,
    about: str,
    sections: Sequence[Section],
    origin: str,
    pictures: Mapping[str, Any] | None = None,
) -> str:
    """HTML of a page. ``of``: the command that writes it; ``origin``: what it is made from.

    ``pictures``: the data of ``Charts``; None: the page has none, and no script.
    """
    assets = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return assets.get_template("page.html").render(
        of=of,
        title=title,
        about=about,
        sections=sections,
        style=Markup((ASSETS / "page.css").read_text(encoding="utf-8")),
        script=Markup((ASSETS / "page.js").read_text(encoding="utf-8")),
        bokeh=None if pictures is None else _bokeh(),
        pictures=None if pictures is None else _inside_a_script(pictures),
        origin=origin,
        version=moefw.__version__,
        written=time.strftime("%Y-%m-%d at %H:%M:%S"),
    )


def write(html: str, out: Path) -> None:
    """Write a page, which replaces an earlier one whole. Raises OSError if it cannot be written."""
    with replaced_file(out) as scratch:
        scratch.write_text(html, encoding="utf-8")


def _bokeh() -> Markup:
    """The script of Bokeh."""
    from bokeh.resources import Resources

    script, *_ = Resources(mode="inline", components=["bokeh"]).js_raw  # what follows sets a log level, and logs that
    return Markup(script)


def _inside_a_script(data: object) -> Markup:
    """JSON that cannot end the script element around it: it has no ``<``."""
    return Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))
