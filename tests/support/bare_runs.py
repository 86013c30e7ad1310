"""Runs without what takes a user's run a second or more beside its training: sample, page, and the plan of its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moefw.commands import report as pages
from moefw.commands import train
from moefw.compose.assembly import Assembly
from moefw.training import report as samples

write_page = pages._write_page
"""What writes the page of a user."""


def make_runs_bare() -> None:
    """Let runs of this process, and of copies of it, have a sample of four tokens, a page of a line and no plan."""
    samples.SAMPLE_TOKENS = 4
    pages._write_page = _write_line
    train.planned_beside = _unplanned


def _write_line(runs: Sequence[Path], out: Path) -> None:
    out.write_text(f"a page about {len(runs)} runs\n")


@contextmanager
def _unplanned(assembly: Assembly) -> Iterator[None]:
    yield
