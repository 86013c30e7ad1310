"""Wall time of a step by section."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from rich.table import Table

from moefw.core.records import Action
from moefw.system.stamps import stamp

OTHER = "other"


class Clock(Protocol):
    """Measures the time of named sections."""

    def __call__(self, section: str, *passes: Action) -> AbstractContextManager[None]:
        """Measure the section that follows. ``passes``: the pass that runs in it and, second, its partner in a pair."""


class SectionTime(NamedTuple):
    """One line of a breakdown: ``seconds_per_step`` of wall time, ``share`` of the step between 0 and 1."""

    section: str
    seconds_per_step: float
    share: float


@dataclass
class Aside:
    """What was done between steps, and how many ``seconds`` it took, once it is done."""

    seconds: float = 0.0


@final
class StepClock:
    """Adds up wall time by section: ``with clock("forward"): ...``, then ``step_done()``.

    A step lasts from one ``step_done`` to the next; the first starts at construction. What happens ``aside``, such as
    an evaluation, is no part of it. The breakdown leaves out the first ``warmup`` steps (compilation, allocator,
    caches).

    A GPU runs asynchronously, and the clock does not wait for it. A section then shows the time to launch its work, and
    the wait counts in the section that first needs a result. ``synchronise=True`` waits for the device at both ends of
    every section, which gives each section its own time and makes the whole step slower.
    """

    def __init__(
        self, *, warmup: int = 3, synchronise: bool = False, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._warmup = warmup
        self._wait = _wait_for_device if synchronise else _go_on
        self._now = now
        self._open: str | None = None
        self._aside_s = 0.0
        self._step: defaultdict[str, float] = defaultdict(float)
        self._total: defaultdict[str, float] = defaultdict(float)
        self._total_s = 0.0
        self._num_steps = 0
        self._step_start_s = now()

    @contextmanager
    def __call__(self, section: str, *passes: Action) -> Iterator[None]:
        """Stamp a section and time the code inside. A section may repeat within a step; sections do not nest.

        The ``passes`` that run in it do not matter here.
        """
        assert self._open is None, f"section {section!r} inside section {self._open!r}"
        assert section != OTHER, "'other' is what no section covers"
        self._open = section
        stamp(section)
        self._wait()
        start_s = self._now()
        try:
            yield
        finally:
            self._wait()
            self._step[section] += self._now() - start_s
            self._open = None

    @contextmanager
    def aside(self, section: str) -> Iterator[Aside]:
        """Stamp what is done between steps, and leave its time out of the step. Outside of sections."""
        assert self._open is None, f"{section!r} inside section {self._open!r}"
        stamp(section)
        self._wait()
        start_s = self._now()
        aside = Aside()
        try:
            yield aside
        finally:
            self._wait()
            aside.seconds = self._now() - start_s
            self._aside_s += aside.seconds

    def step_done(self) -> dict[str, float]:
        """End a step and begin the next; return the seconds of its sections and of the rest, "other"."""
        assert self._open is None, f"the step ended inside section {self._open!r}"
        self._wait()
        now_s = self._now()
        step_s = now_s - self._step_start_s - self._aside_s
        sections = dict(self._step)
        self._num_steps += 1
        if self._num_steps > self._warmup:
            self._total_s += step_s
            for section, seconds in sections.items():
                self._total[section] += seconds
        self._step.clear()
        self._aside_s = 0.0
        self._step_start_s = now_s
        return {**sections, OTHER: max(step_s - sum(sections.values()), 0.0)}

    def breakdown(self) -> list[SectionTime]:
        """Sections in the order of their first use, then "other"; shares sum to 1.

        Empty until a step after the warm-up is done.
        """
        measured = self._num_steps - self._warmup
        if measured < 1:
            return []
        seconds = {**self._total, OTHER: max(self._total_s - sum(self._total.values()), 0.0)}
        return [SectionTime(section, s / measured, s / self._total_s) for section, s in seconds.items()]


def render(breakdown: Sequence[SectionTime]) -> Table:
    """Breakdown as a table for a terminal; the last row is the whole step."""
    table = Table(title="Time of a step", title_justify="left", show_footer=True)
    table.add_column("section", footer="step")
    table.add_column("ms", justify="right", footer=_milliseconds(sum(row.seconds_per_step for row in breakdown)))
    table.add_column("share", justify="right")
    for row in breakdown:
        table.add_row(row.section, _milliseconds(row.seconds_per_step), f"{row.share:.1%}")
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _go_on() -> None:
    pass
