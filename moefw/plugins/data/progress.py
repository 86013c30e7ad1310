"""Progress of the encoding of a corpus: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_EVERY_S = 10.0


@final
class EncodingProgress:
    """Counts encoded bytes out of ``total``; a context manager. Writes to standard error.

    If that is no terminal, an encoding that takes less than ``LINE_EVERY_S`` seconds prints nothing.
    """

    def __init__(
        self,
        total: int,
        *,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._done = 0
        self._console = console or Console(stderr=True)
        self._now = now
        self._start_s = self._line_s = now()
        columns = (TextColumn("encoding"), BarColumn(), DownloadColumn(), TextColumn("left"), TimeRemainingColumn())
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar = Bar(*columns, console=self._console, transient=True) if live else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
            self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Add bytes that are done."""
        self._done += count
        now_s = self._now()
        if self._bar:
            self._bar.advance(self._bar.task_ids[0], count)
        elif now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            left_s = round((now_s - self._start_s) * (self._total / self._done - 1))
            done = self._done / 1e6
            total = self._total / 1e6
            line = f"encoding: {done:,.0f} of {total:,.0f} MB  left {left_s // 60}:{left_s % 60:02}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
