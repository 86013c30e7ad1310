"""``moefw report``: an HTML page about a run, or about several."""

from __future__ import annotations

from pathlib import Path

import click

from moefw.commands.waiting import waiting
from moefw.core.errors import SpecError

PAGE = "report.html"


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--out", type=click.Path(path_type=Path), help="The page.  [default: report.html in the first RUN]")
def report(runs: tuple[Path, ...], out: Path | None) -> int:
    """Write one HTML page about RUN (a run's folder), or about several runs beside each other.

    The page needs no other file and no network. A run may still be going. An earlier page is replaced whole.
    """
    from moefw.report.page import write_page

    out = runs[0] / PAGE if out is None else out
    try:
        with waiting("reading the run" if len(runs) == 1 else "reading the runs"):
            write_page(runs, out)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"{error.filename or out}: {reason}.", "Name a run and a page that can be used.") from error
    click.echo(f"the report is in {out}")
    return 0
