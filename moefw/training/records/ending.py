"""The end of a run's events, which the process that holds its folder adds if the ranks left none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, final

from moefw.core.errors import DataError, MoefwError
from moefw.training.errors import NotWrittenError, StoppedError
from moefw.training.records.events import EVENTS, STARTS, EventLog, read_events
from moefw.training.records.json_lines import Record
from moefw.training.records.metrics import METRICS, read_metrics

Outcome = Literal["done", "stopped", "failed"]


def reason_of(error: BaseException) -> str:
    """Message of one of our errors; the name of another one before its message."""
    if isinstance(error, MoefwError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


@final
class RecordedEnd:
    """Context manager around the ranks of a run, in the process that holds its folder.

    Afterwards it adds an event ``end`` if a run has started inside and its leading rank recorded none: it was killed,
    or only this process knows why the run ended. ``code`` is the exit code, where no error is raised. If this process
    is killed, too, the run has no end.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._starts = 0
        self.code = 0

    def __enter__(self) -> Self:
        self._starts = sum(event["event"] in STARTS for event in self._events())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        events = list(self._events())
        has_started = sum(event["event"] in STARTS for event in events) > self._starts
        if not has_started or events[-1]["event"] == "end":
            return
        outcome, reason = self._outcome(error)
        with suppress(OSError, DataError, NotWrittenError), EventLog(self._run_dir) as log:
            log.attempt("end", self._last_step(events[-1]["step"]), outcome=outcome, reason=reason)

    def _outcome(self, error: BaseException | None) -> tuple[Outcome, str]:
        if isinstance(error, StoppedError | KeyboardInterrupt):
            return "stopped", reason_of(error)
        if error is not None:
            return "failed", reason_of(error)
        if self.code:
            return "failed", f"a rank has left with exit code {self.code}, and said why."
        return "done", ""

    def _events(self) -> Iterator[Record]:
        with suppress(OSError, DataError):
            yield from read_events(self._run_dir / EVENTS)

    def _last_step(self, step: int) -> int:
        """Step of the last line of metrics; ``step`` if there is none."""
        with suppress(OSError, DataError):
            for record in read_metrics(self._run_dir / METRICS):
                step = record["step"]
        return step
