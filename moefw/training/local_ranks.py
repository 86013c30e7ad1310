"""The ranks of a launcher while they run: it looks at their records, and decides what becomes of the run."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, final

from attrs import evolve

from moefw.compose.spec.sections import RunSpec
from moefw.core.errors import RunError
from moefw.training.faults.blame import Seen, accusation, culprit
from moefw.training.faults.board import record_file, stack_file
from moefw.training.faults.departures import Departed, Outcome, lost_contact, outcome
from moefw.training.faults.kernel import oom_kills, process_state
from moefw.training.faults.patience import Stillness
from moefw.training.faults.record import Record, read_record
from moefw.training.faults.requests import StopRequests
from moefw.training.faults.stacks import keep_others

_LOOK_S: Final = 0.05
_SEEN_S: Final = 0.2
"""The process that died first may not be the one that is seen first: so long all are looked at together."""
_WORD_S: Final = 10.0
"""Ranks lose contact before the one that has left says why."""
_STACKS_S: Final = 1.0


@final
class LocalRanks:
    """Processes that share a private folder with this one, in which they have their records and stacks."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        folder: Path,
        run: RunSpec,
        requests: StopRequests,
        memory_note: Callable[[], str],
    ) -> None:
        self._processes, self._folder, self._run = processes, folder, run
        self._requests, self._memory_note = requests, memory_note
        self._buffers = [record_file(folder, rank) for rank in range(len(processes))]
        self._still, self._oom_kills = Stillness(), oom_kills()
        self._forwarded, self._lost_until_s = False, math.inf

    def wait(self) -> int:
        """Return the exit code of the run as soon as it is decided; ranks may be there still.

        Raises RunError with what no rank says itself, StoppedError where a signal came before anything was to save.
        """
        self._requests.mode = "defer"
        while True:
            found = self._outcome()
            if found is not None:
                if found.problem is not None:
                    raise RunError(found.problem)
                return found.code
            if self._requests.asked is not None and not self._forwarded:
                self._forward(self._requests.asked)
            self._end_if_hung()
            time.sleep(_LOOK_S)

    def _outcome(self) -> Outcome | None:
        """Return what ranks that have left make of the run, None as long as nothing."""
        gone = self._gone()
        if all(each.well for each in gone):
            return Outcome(code=0) if len(gone) == len(self._processes) else None
        time.sleep(_SEEN_S)
        gone = self._gone()
        found = outcome(gone, oom_kills=oom_kills() - self._oom_kills, memory_note=self._memory_note)
        if found is None:
            self._lost_until_s = min(self._lost_until_s, time.monotonic() + _WORD_S)
            if len(gone) == len(self._processes) or time.monotonic() > self._lost_until_s:
                return Outcome(code=1, problem=lost_contact([each for each in gone if not each.well]))
        return found

    def _gone(self) -> list[Departed]:
        codes = [process.poll() for process in self._processes]
        return [
            Departed(rank=rank, record=self._record(rank), code=code)
            for rank, code in enumerate(codes)
            if code is not None
        ]

    def _record(self, rank: int) -> Record:
        """Return a rank's record, with the process that was started where it has not said yet who it is."""
        return evolve(read_record(self._buffers[rank]), pid=self._processes[rank].pid, host=socket.gethostname())

    def _forward(self, number: signal.Signals) -> None:
        """Ask all ranks to save at the end of their step; end them where one has not begun its first."""
        if not all(self._record(rank).step for rank in range(len(self._processes))):
            kill(self._processes)
            raise self._requests.stopped(number)
        _send(signal.SIGTERM, self._processes)
        self._forwarded = True

    def _end_if_hung(self) -> None:
        """Raise RunError, with no rank left and their stacks kept, where one of them does not get on."""
        alive = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
        records = {rank: self._record(rank) for rank in alive}
        still = self._still.of({rank: record.stamps for rank, record in records.items()})
        ranks = [
            Seen(rank=rank, record=records[rank], still_s=still[rank], state=process_state(self._processes[rank].pid))
            for rank in alive
        ]
        found = culprit(ranks, self._run.timeout_s)
        if found is None:
            return
        problem = accusation(found, ranks, self._run.timeout_s)
        stacks = self._take_stacks([rank for rank in alive if records[rank].stamps])
        kill(self._processes)
        raise RunError(evolve(problem, what=f"{problem.what} {stacks}"))

    def _take_stacks(self, ranks: Sequence[int]) -> str:
        """Let ranks that have begun write their stacks, which a stopped one does when it goes on."""
        files = [stack_file(self._folder, rank) for rank in ranks]
        _send(signal.SIGUSR2, [self._processes[rank] for rank in ranks])
        _send(signal.SIGCONT, self._processes)
        deadline, sizes = time.monotonic() + _STACKS_S, list[int]()
        while time.monotonic() < deadline:
            before, sizes = sizes, [file.stat().st_size for file in files]
            if all(sizes) and sizes == before:
                break
            time.sleep(_LOOK_S)
        return keep_others(files, Path(self._run.dir))


def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all processes at once; one that is stopped ends, too."""
    _send(signal.SIGKILL, processes)
    for process in processes:
        process.wait()


def _send(number: signal.Signals, processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(number)  # does nothing to one that has ended
