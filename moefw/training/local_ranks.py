"""Supervision of a launcher's ranks: reads their records and decides the outcome of the run."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

from attrs import evolve

from moefw.compose.spec.sections import RunSpec
from moefw.core.errors import RunError
from moefw.training.faults.blame import Seen, accusation, culprit
from moefw.training.faults.departures import Departed, Outcome, lost_contact, outcome
from moefw.training.faults.kernel import oom_kills, process_state
from moefw.training.faults.patience import Stillness
from moefw.training.faults.rank_files import record_file, stack_file
from moefw.training.faults.record import Record, read_record
from moefw.training.faults.requests import StopRequests
from moefw.training.faults.stacks import is_whole, keep_others
from moefw.training.faults.way_on import with_way_on

_LOOK_S: Final = 0.05
_SEEN_S: Final = 0.2
"""Delay after a failure is seen, as the process that died first may not be the one seen first."""
_WORD_S: Final = 10.0
"""Time for a rank that left to report why, after the others lost contact with it."""
_STACKS_S: Final = 1.0
_WRITES_S: Final = 0.25
"""Time for a rank to write its stacks before it is asked again."""


@final
class LocalRanks:
    """Rank processes, whose records and stacks are in a private folder that they share with this process."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        folder: Path,
        run: RunSpec,
        requests: StopRequests,
        memory_note: Callable[[], str],
    ) -> None:
        self._processes = processes
        self._folder = folder
        self._run_dir = Path(run.dir)
        self._timeout_s = run.timeout_s
        self._requests = requests
        self._memory_note = memory_note
        self._buffers = [record_file(folder, rank) for rank in range(len(processes))]
        self._still = Stillness()
        self._oom_kills = oom_kills()
        self._forwarded = False
        self._lost_until_s = math.inf

    def wait(self) -> int:
        """Exit code of the run as soon as it is decided; ranks may still be running.

        Raises RunError with a problem that no rank reports, and StoppedError if a signal came before there was anything
        to save.
        """
        self._requests.mode = "defer"
        while True:
            decided = self._outcome()
            if decided is not None:
                if decided.problem is not None:
                    raise RunError(with_way_on(decided.problem, self._run_dir))
                return decided.code
            if self._requests.asked is not None and not self._forwarded:
                self._forward(self._requests.asked)
            self._end_if_hung()
            time.sleep(_LOOK_S)

    def _outcome(self) -> Outcome | None:
        """Outcome of the run by the ranks that have left, None while it is undecided."""
        gone = self._gone()
        if all(each.well for each in gone):
            return Outcome(code=0) if len(gone) == len(self._processes) else None
        time.sleep(_SEEN_S)
        gone = self._gone()
        decided = outcome(gone, oom_kills=oom_kills() - self._oom_kills, memory_note=self._memory_note)
        if decided is None:
            self._lost_until_s = min(self._lost_until_s, time.monotonic() + _WORD_S)
            if len(gone) == len(self._processes) or time.monotonic() > self._lost_until_s:
                return Outcome(code=1, problem=lost_contact([each for each in gone if not each.well]))
        return decided

    def _gone(self) -> list[Departed]:
        codes = [process.poll() for process in self._processes]
        return [
            Departed(rank=rank, record=self._record(rank), code=code)
            for rank, code in enumerate(codes)
            if code is not None
        ]

    def _record(self, rank: int) -> Record:
        """A rank's record, with the pid and host of the process that was started."""
        return evolve(read_record(self._buffers[rank]), pid=self._processes[rank].pid, host=socket.gethostname())

    def _forward(self, number: signal.Signals) -> None:
        """Ask all ranks to save at the end of their step. Kill them if one has not begun its first step."""
        if not all(self._record(rank).step for rank in range(len(self._processes))):
            kill(self._processes)
            raise self._requests.stopped(number)
        _send(signal.SIGTERM, self._processes)
        self._forwarded = True

    def _end_if_hung(self) -> None:
        """If a rank hangs, keep the stacks, kill all ranks and raise RunError."""
        alive = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
        records = {rank: self._record(rank) for rank in alive}
        still = self._still.of({rank: record.stamps for rank, record in records.items()})
        ranks = [
            Seen(rank=rank, record=records[rank], still_s=still[rank], state=process_state(self._processes[rank].pid))
            for rank in alive
        ]
        hanging = culprit(ranks, self._timeout_s)
        if hanging is None:
            return
        problem = with_way_on(accusation(hanging, ranks, self._timeout_s), self._run_dir)
        stacks = self._take_stacks([rank for rank in alive if records[rank].stamps])
        kill(self._processes)
        raise RunError(evolve(problem, what=f"{problem.what} {stacks}"))

    def _take_stacks(self, ranks: Sequence[int]) -> str:
        """Let ranks write their stacks, and return where these are. A stopped rank is continued to write its own.

        A rank whose stacks break off is asked again, and appends them anew.
        """
        files = {rank: stack_file(self._folder, rank) for rank in ranks}
        deadline = time.monotonic() + _STACKS_S
        asked = ranks
        while asked and time.monotonic() < deadline:
            _send(signal.SIGUSR2, [self._processes[rank] for rank in asked])
            _send(signal.SIGCONT, self._processes)
            asked = _broken_off(files, until_s=time.monotonic() + _WRITES_S)
        return keep_others([*files.values()], self._run_dir)


def _broken_off(files: Mapping[int, Path], *, until_s: float) -> list[int]:
    """Ranks whose files of stacks are not whole by then."""
    while True:
        ranks = [rank for rank, file in files.items() if not is_whole(file.read_text(errors="replace"))]
        if not ranks or time.monotonic() > until_s:
            return ranks
        time.sleep(_LOOK_S)


def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill all processes at once, including stopped ones, and wait for their end."""
    _send(signal.SIGKILL, processes)
    for process in processes:
        process.wait()


def _send(number: signal.Signals, processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(number)  # does nothing if the process has ended
