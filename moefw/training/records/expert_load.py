"""The load of every expert, averaged over a bounded number of windows of steps: ``expert_load.jsonl``."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from functools import reduce
from pathlib import Path
from typing import Final, final

import numpy as np
from attrs import frozen

from moefw.system.files import replaced_file
from moefw.training.full_disk import written
from moefw.training.records.experts import Floats
from moefw.training.records.json_lines import Appended, Closed, keep_lines, line_of, read_lines

EXPERT_LOAD: Final = "expert_load.jsonl"
MOST_WINDOWS: Final = 128
"""Number of windows at which neighbours are merged."""
DECIMALS: Final = 4
"""Decimals of a share of tokens."""


@frozen(eq=False)
class Window:
    """The mean share of tokens of each expert over steps ``first`` to ``last``: ``load_LE``, 1.0 is fair.

    ``layers``: the numbers of the MoE layers, one for each row.
    """

    first: int
    last: int
    layers: tuple[int, ...]
    load_LE: Floats

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.last - self.first + 1

    def line(self) -> bytes:
        """The window as a line of the file."""
        load = np.round(self.load_LE, DECIMALS).tolist()
        return line_of({"first": self.first, "last": self.last, "layers": self.layers, "load": load})

    def with_next(self, other: Window) -> Window:
        """Both in one, weighted by their steps. Steps between, which a killed run has lost, count as this one's."""
        before = other.first - self.first
        load_LE = (before * self.load_LE + other.steps * other.load_LE) / (before + other.steps)
        return Window(self.first, other.last, self.layers, load_LE)


def read_expert_load(path: Path) -> Iterator[Window]:
    """Yield the windows of an ``expert_load.jsonl``, oldest first; none if there is no file, as in older runs.

    An incomplete last line is skipped. Raises DataError at a damaged line before the last.
    """
    for record, _ in read_lines(path):
        load_LE = np.array(record["load"], dtype=np.float64)
        yield Window(record["first"], record["last"], tuple(record["layers"]), load_LE)


def last_steps(windows: Iterable[Window], steps: int) -> Window | None:
    """The newest windows in one, as few as have ``steps`` steps, or all; None if there is none."""
    newest: deque[Window] = deque()
    for window in windows:
        newest.append(window)
        while newest[-1].last - newest[0].last >= steps:
            newest.popleft()
    return reduce(Window.with_next, newest) if newest else None


@final
class ExpertLoadLog(Closed):
    """Writes ``run_dir/expert_load.jsonl``; one process may write at a time.

    A window is appended when it is full; it has one step at first. When there are ``MOST_WINDOWS``, neighbours are
    merged, and windows have twice as many steps from then on. So a run of any length keeps at most as many. What is not
    in the file yet are the sums of one window, which ``close`` appends as it is, and a killed run loses.

    An existing file is continued. With ``keep_until``, as after a resume from that step, windows with later steps are
    removed. ``writing`` surrounds each write and decides how a failure is handled.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_until: int | None = None,
        writing: Callable[[Path], AbstractContextManager[None]] = written,
    ) -> None:
        self._writing = writing
        self._file = Appended(run_dir / EXPERT_LOAD)
        self._most_steps = 1
        self._number = 0
        last = math.inf if keep_until is None else keep_until
        with writing(self._file.path):
            if self._file.path.exists():
                keep_lines(self._file.path, lambda record: record["last"] <= last)
                self._count()
        self._sum: Window | None = None

    def _count(self) -> None:
        """Go on with windows as long as those in the file."""
        longest = 1
        for record, _ in read_lines(self._file.path):
            self._number += 1
            longest = max(longest, record["last"] - record["first"] + 1)
        self._most_steps = 2 ** math.ceil(math.log2(longest))

    def add(self, step: int, layers: Sequence[int], load_LE: Floats) -> None:
        """Add the load of a step, whose steps follow one another: the share of tokens of each expert, 1.0 is fair."""
        new = Window(step, step, tuple(layers), load_LE)
        self._sum = new if self._sum is None else self._sum.with_next(new)
        if self._sum.steps >= self._most_steps:
            self.end_window()

    def end_window(self) -> None:
        """Append the window, also if it is not full; do nothing if it has no step."""
        if self._sum is None:
            return
        line = self._sum.line()
        self._sum = None
        self._number += 1
        with self._writing(self._file.path):
            self._file.append(line)
            while self._number >= MOST_WINDOWS:
                self._merge()

    def _merge(self) -> None:
        """Replace the file by one whose windows are twice as long."""
        self._file.close()
        most_steps = 2 * self._most_steps
        number = 0
        with replaced_file(self._file.path) as scratch, scratch.open("wb") as file:
            for window in merged(read_expert_load(self._file.path), most_steps):
                file.write(window.line())
                number += 1
            file.flush()
            os.fsync(file.fileno())
        self._most_steps = most_steps
        self._number = number

    def close(self) -> None:
        """Append what the window that is not full holds; closing twice is allowed."""
        with closing(self._file):
            self.end_window()
            with self._writing(self._file.path):
                self._file.append(b"")


def merged(windows: Iterator[Window], most_steps: int) -> Iterator[Window]:
    """Yield windows joined with their neighbours, while they span at most ``most_steps``."""
    joined: Window | None = None
    for window in windows:
        if joined is None:
            joined = window
        elif window.last - joined.first < most_steps:
            joined = joined.with_next(window)
        else:
            yield joined
            joined = window
    if joined is not None:
        yield joined
