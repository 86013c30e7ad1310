"""A line on the terminal while a command computes for long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

QUIET_S = 2.0
"""Seconds without a line: what is done by then needs none."""


@contextmanager
def waiting(what: str, console: Console | None = None, quiet_s: float = QUIET_S) -> Iterator[None]:
    """Show ``what`` and the time that it has taken, from ``quiet_s`` on; on standard error, if that is a terminal."""
    if console is None and not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = console or Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(what, total=None)
    timer = threading.Timer(quiet_s, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
