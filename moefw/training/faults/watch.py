"""The watch of a rank: a thread that detects hangs of its main thread and, without moefw's launcher, of other ranks."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn, Self, final

from attrs import evolve

from moefw.compose.spec.sections import RunSpec
from moefw.core.errors import Problem
from moefw.training.faults.blame import Seen, accusation, culprit, left_silently, vanished
from moefw.training.faults.kernel import SILENT, process_state
from moefw.training.faults.patience import LOOK_S, Stillness, look_every_s
from moefw.training.faults.peers import Accused, Peers, SilentStoreError, silent_store, speaker
from moefw.training.faults.rank_files import meeting_folder, record_file, stack_file
from moefw.training.faults.record import RECORD_BYTES, Ending, Record, read_record, write_ending, write_look, write_who
from moefw.training.faults.requests import StopRequests
from moefw.training.faults.stacks import keep_own
from moefw.training.faults.stamps import RankStamps
from moefw.training.faults.way_on import with_way_on
from moefw.training.faults.where import waits_in
from moefw.training.world import Place


@final
class Watch:
    """One rank's record, and the thread that updates it while this context manager is open. Opened by the main thread.

    moefw's launcher reads the records of its ranks. Other ranks exchange them once they share a store, and this process
    ends when one of these ranks hangs. It also ends on a signal that the main thread does not answer.
    """

    def __init__(self, run: RunSpec, place: Place, requests: StopRequests) -> None:
        self._run_dir = Path(run.dir)
        self._timeout_s = run.timeout_s
        self._place = place
        self._requests = requests
        self._folder = meeting_folder()
        own = memoryview(bytearray(RECORD_BYTES))
        self._record = own if self._folder is None else record_file(self._folder, place.rank)
        self._every_s = look_every_s(run.timeout_s)
        self._main = threading.get_ident()
        self._still = Stillness()
        self._silent = Stillness()
        self._beats = 0
        self._peers: Peers | None = None
        self._ended = False
        self._open = ExitStack()
        self._thread = threading.Thread(target=self._watch, name="moefw-watch", daemon=True)
        self.stamps = RankStamps(self._record, wake=requests.wake)

    @property
    def launched(self) -> bool:
        """Whether moefw's launcher watches this rank."""
        return self._folder is not None

    @property
    def seen(self) -> Record:
        """The record as others see it."""
        return read_record(self._record)

    def end(self, ending: Ending) -> None:
        """Write how the rank leaves."""
        write_ending(self._record, ending)

    def __enter__(self) -> Self:
        host = socket.gethostname()
        write_who(self._record, os.getpid(), host, f"{host} {os.readlink('/proc/self/ns/pid')}")
        if self._folder is not None:
            file = self._open.enter_context(stack_file(self._folder, self._place.rank).open("wb"))
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
            self._open.callback(faulthandler.unregister, signal.SIGUSR2)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._requests.wake()
        self._thread.join(LOOK_S)
        if self._peers is not None and not self._thread.is_alive():
            with suppress(SilentStoreError, ConnectionError):
                self._peers.tell(bytes(self._record))
        self._open.close()

    def _watch(self) -> None:
        while not self._ended:
            self._requests.wait(self._every_s)
            stopped = self._requests.overdue()
            if stopped is not None:
                self._leave(str(stopped), stopped.exit_code)
            if not self._ended:
                self._look()

    def _look(self) -> None:
        """Publish where the main thread is, and check all ranks that this one watches."""
        rank = self._place.rank
        stamps = self.seen.stamps
        own_s = self._still.of({rank: stamps})[rank]
        self._beats += 1
        where = waits_in(self._main) if own_s >= self._every_s else ""
        write_look(self._record, self._beats, where, stamps=stamps)
        if self.launched:
            return
        ranks: Sequence[Seen] = [Seen(rank=rank, record=self.seen, still_s=own_s)]
        if self._place.world > 1 and self.stamps.store is not None:
            ranks = self._met(ranks)
        gone = vanished(ranks) if self.seen.ending == "lost" else None
        if gone is not None:
            self._accuse(gone, left_silently(gone))
        hanging = culprit(ranks, self._timeout_s)
        if hanging is not None:
            self._accuse(hanging, accusation(hanging, ranks, self._timeout_s))

    def _met(self, own: Sequence[Seen]) -> Sequence[Seen]:
        """All ranks that this one watches, by their records in the store."""
        place = self._place
        try:
            if self._peers is None:
                self._peers = Peers(self.stamps.store, place.rank, place.world, timeout_s=self._timeout_s)
            self._peers.tell(bytes(self._record))
            accused = self._peers.accused()
            if accused is not None:
                self._follow(accused)
            if not self._peers.watches:
                return []
            records = self._peers.look()
        except SilentStoreError:
            self._leave_without_store()
        except ConnectionError:
            return own
        still = self._still.of({rank: record.stamps for rank, record in records.items()})
        silent = self._silent.of({rank: record.beats for rank, record in records.items()})
        return [
            Seen(rank=rank, record=record, still_s=still[rank], state=self._state(record, silent[rank]), heard=True)
            for rank, record in records.items()
        ]

    def _state(self, record: Record, silent_s: float) -> str:
        """Why a peer does not run; on another machine, only its silence is known."""
        if record.machine == self.seen.machine:
            return process_state(record.pid)
        return SILENT if silent_s > 3 * self._every_s else ""

    def _accuse(self, seen: Seen, problem: Problem) -> NoReturn:
        """Report the problem of a rank, unless another rank has done so, and leave."""
        record = seen.record
        if self._peers is not None:
            accused = Accused(by=self._place.rank, machine=record.machine, pid=record.pid)
            with suppress(SilentStoreError, ConnectionError):
                if not self._peers.accuse(accused):
                    self._follow(accused)
            self._awaken(accused)
        self._report(problem, stacks=keep_own(self._run_dir, self._place.rank))

    def _follow(self, accused: Accused) -> NoReturn:
        """Leave, as another rank has reported the problem."""
        keep_own(self._run_dir, self._place.rank)
        self._awaken(accused)
        os._exit(1)

    def _leave_without_store(self) -> NoReturn:
        assert self._peers is not None
        stacks = keep_own(self._run_dir, self._place.rank)
        keeper = self._peers.last[0]
        accused = Accused(by=self._place.rank, machine=keeper.machine, pid=keeper.pid)
        self._awaken(accused)
        with suppress(SilentStoreError, ConnectionError):
            self._peers.accuse(accused)
        if self._place.rank != speaker():
            time.sleep(2 * LOOK_S)
            os._exit(1)
        self._report(silent_store(keeper, self._timeout_s), stacks=stacks)

    def _report(self, problem: Problem, *, stacks: str) -> NoReturn:
        """Report a problem, where the stacks are, and how the run goes on, and leave."""
        told = with_way_on(evolve(problem, what=f"{problem.what} {stacks}"), self._run_dir)
        self._leave(f"error: {told}", 1)

    def _awaken(self, accused: Accused) -> None:
        """Continue a stopped process on this machine: it reads the accusation, keeps its stacks and ends."""
        if accused.machine == self.seen.machine:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(accused.pid, signal.SIGCONT)

    def _leave(self, why: str, code: int) -> NoReturn:
        """Print why and end this process, after the others had time to read the accusation."""
        os.write(2, f"{why}\n".encode(errors="replace"))
        if self._peers is not None:
            time.sleep(2 * LOOK_S)
        os._exit(code)
