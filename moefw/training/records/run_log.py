"""All that the leading rank records of a run, opened and closed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np
from attrs import frozen

from moefw.training.errors import NotWrittenError
from moefw.training.records.events import Event, EventLog
from moefw.training.records.expert_load import ExpertLoadLog
from moefw.training.records.json_lines import Record
from moefw.training.records.metrics import MetricsLog


@frozen
class _Logs:
    events: EventLog
    metrics: MetricsLog
    expert_load: ExpertLoadLog


@final
class RunLog:
    """The files of a run's records. Nothing is recorded until it is opened, as on ranks that do not lead."""

    def __init__(self) -> None:
        self._logs: _Logs | None = None

    def open(
        self, run_dir: Path, *, keep_until: int | None, writing: Callable[[Path], AbstractContextManager[None]]
    ) -> None:
        """Begin to record in a run's folder.

        ``keep_until``: the step from which the run goes on, behind which lines and windows are removed; None: it is
        new. ``writing`` surrounds each write of a file and decides how a failure is handled.
        """
        self._logs = _Logs(
            EventLog(run_dir, writing=writing),
            MetricsLog(run_dir, keep_until=keep_until, writing=writing),
            ExpertLoadLog(run_dir, keep_until=keep_until, writing=writing),
        )

    @property
    def lost_steps(self) -> int:
        """Number of recorded steps that were removed when the log was opened."""
        return 0 if self._logs is None else self._logs.metrics.lost_steps

    def step(self, record: Record, layers: Sequence[int], load_LE: Sequence[Sequence[float]]) -> None:
        """Write the line of a step, and add the load of its experts in each of the MoE ``layers``."""
        if self._logs is None:
            return
        self._logs.metrics.write(record)
        if layers:
            self._logs.expert_load.add(record["step"], layers, np.array(load_LE))

    def event(self, event: Event, step: int, **fields: object) -> None:
        """Append an event after ``step``, the last one that is done."""
        if self._logs is not None:
            self._logs.events.write(event, step, **fields)

    def attempt(self, event: Event, step: int, **fields: object) -> None:
        """Append an event, and go on if it cannot be written."""
        if self._logs is not None:
            self._logs.events.attempt(event, step, **fields)

    def end_window(self) -> None:
        """Write the load of the last steps, also if they do not fill a window."""
        if self._logs is not None:
            self._logs.expert_load.end_window()

    def close(self) -> None:
        """Write what waits, and close all files."""
        with ExitStack() as stack:
            if self._logs is not None:
                for log in (self._logs.events, self._logs.metrics, self._logs.expert_load):
                    stack.callback(log.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(NotWrittenError) if error is not None else ExitStack():  # the first failure is reported
            self.close()
