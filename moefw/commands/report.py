"""``moefw report``: an HTML page about a run, or about several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from moefw.commands.waiting import waiting
from moefw.core.errors import SpecError, os_reason, printable
from moefw.training.faults.requests import StopRequests
from moefw.training.records.metrics import METRICS

PAGE = "report.html"
COMPARISON = "comparison.html"


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The page.  [default: report.html in RUN, comparison.html in the first of several]",
)
def report(runs: tuple[Path, ...], out: Path | None) -> int:
    """Write one HTML page about RUN (a run's folder), or about several runs beside each other.

    The page needs no other file and no network. A run may still be going. An earlier page is replaced whole.
    """
    out = runs[0] / (PAGE if len(runs) == 1 else COMPARISON) if out is None else out
    try:
        with waiting("reading the run" if len(runs) == 1 else "reading the runs"):
            _write_page(runs, out)
    except OSError as error:
        reason = os_reason(error)
        raise SpecError(f"{error.filename or out}: {reason}.", "Name a run and a page that can be used.") from error
    click.echo(f"the report is in {out}")
    return 0


@contextmanager
def reported(run_dir: Path, requests: StopRequests, *, failures: bool) -> Iterator[None]:
    """Write the page of the run that ends inside, and print where it is, or in a line why there is none.

    With ``failures`` also of a run that fails. Not after a signal: who sent it may not wait for a page.
    """
    done = False
    try:
        yield
        done = True
    finally:
        if (done or failures) and requests.asked is None:
            _write_beside(run_dir)


def _write_beside(run_dir: Path) -> None:
    """Write the page of a run into its folder. Whatever goes wrong costs a line, and no run."""
    metrics = run_dir / METRICS
    if not metrics.is_file() or not metrics.stat().st_size:
        return  # it has not made a step
    page = run_dir / PAGE
    try:
        _write_page([run_dir], page)
    except OSError as error:
        click.echo(printable(f"there is no report: {error.filename or page}: {os_reason(error)}"))
    except Exception as error:
        click.echo(printable(f"there is no report: {error}"))
    else:
        click.echo(f"the report is in {page}")


def _write_page(runs: Sequence[Path], out: Path) -> None:
    """Write a page about runs. Only then is Bokeh imported, which takes seconds."""
    from moefw.report.page import write_page

    write_page(runs, out)
