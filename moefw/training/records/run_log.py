"""All that the leading rank records of a run, opened and closed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np

from moefw.training.errors import NotWrittenError
from moefw.training.records.expert_load import ExpertLoadLog
from moefw.training.records.json_lines import Record
from moefw.training.records.metrics import MetricsLog


@final
class RunLog:
    """The files of a run's records. With ``run_dir`` None, as on ranks that do not lead, nothing is recorded.

    ``keep_until``: the step from which the run goes on, behind which lines and windows are removed; None: it is new.
    ``writing`` surrounds each write of a file and decides how a failure is handled.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        keep_until: int | None,
        writing: Callable[[Path], AbstractContextManager[None]],
    ) -> None:
        self._logs: tuple[MetricsLog, ExpertLoadLog] | None = None
        if run_dir is not None:
            metrics = MetricsLog(run_dir, keep_until=keep_until, writing=writing)
            self._logs = metrics, ExpertLoadLog(run_dir, keep_until=keep_until, writing=writing)

    def step(self, record: Record, layers: Sequence[int], load_LE: Sequence[Sequence[float]]) -> None:
        """Write the line of a step, and add the load of its experts in each of the MoE ``layers``."""
        if self._logs is None:
            return
        metrics, expert_load = self._logs
        metrics.write(record)
        if layers:
            expert_load.add(record["step"], layers, np.array(load_LE))

    def close(self) -> None:
        """Write what waits, and close all files."""
        with ExitStack() as stack:
            for log in self._logs or ():
                stack.callback(log.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(NotWrittenError):  # the first failure is reported
            self.close()
