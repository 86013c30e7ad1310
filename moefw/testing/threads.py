"""World of ranks that are threads of one process and run the dispatchers' own code.

Each collective is a meeting: the last rank to arrive copies the data of all ranks in memory. So even an asynchronous
collective is done when it returns. To test overlap, use processes (:class:`moefw.testing.pool.RankPool`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.recording.collectives import Collective, Collectives
from moefw.testing.lateness import LOOK_S, Lateness

_ProcessGroup: Any = dist.ProcessGroup
"""The type stub lacks the constructor without a backend."""
MAX_RANKS = 64
GRACE_S = 5.0
"""Seconds that a failed world waits for its threads to end."""
TURN_S = 0.2
"""Seconds after which a rank no longer waits for another one that runs."""


class ThreadGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group of threads, ``ranks`` of their world. Every collective of such a group is a meeting."""

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self.ranks = ranks


def members(group: dist.ProcessGroup) -> list[int]:
    """Ranks of a group in the world, of threads or of processes."""
    return list(group.ranks) if isinstance(group, ThreadGroup) else dist.get_process_group_ranks(group)


def subgroup(group: dist.ProcessGroup, positions: Sequence[int]) -> dist.ProcessGroup:
    """New group of some ranks of a group, this rank's among them. Collective over them."""
    ranks = members(group)
    chosen = tuple(ranks[position] for position in positions)
    if isinstance(group, ThreadGroup):
        return ThreadGroup(ranks[group.rank()], chosen)
    opened: dist.ProcessGroup = dist.new_group(list(chosen), use_local_synchronization=True)
    return opened


def thread_world(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``function(group, rank, *args)`` of every rank, in rank order; each rank is a thread.

    Raises the first exception of a thread, with its rank as a note. Raises ContractError with the missing ranks of a
    collective, if they have returned, or have not arrived after ``timeout_s`` and hang; also if no rank has come to a
    collective or returned for so long. One that computes is waited for: see ``Lateness``.
    """
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"a world of threads has 1 to {MAX_RANKS} ranks, not {size}")
    meeting = _Meeting(size, timeout_s)
    answers: list[Any] = [None] * size

    def run(rank: int) -> None:
        meeting.begin(rank)
        meeting.take_turn(rank)
        try:
            with _MeetingMode(meeting):
                answers[rank] = function(ThreadGroup(rank, tuple(range(size))), rank, *args)
        except _EndedError:
            pass
        except BaseException as error:
            error.add_note(f"(on rank {rank} of a world of {size} threads)")
            meeting.fail(error)
        meeting.leave(rank)
        meeting.pass_turn(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _MeetingMode(meeting):  # PyTorch has one flag for all threads whether a mode is active: keep it set
            for thread in threads:
                thread.start()
            meeting.wait_for_all()
    finally:
        torch.set_num_threads(cores)
    return answers


class _EndedError(BaseException):
    """Unwinds a thread after its world failed on another rank. No ``except Exception`` of a dispatcher stops it."""


class _Meeting:
    """Synchronizes the ranks of a world: each group holds one collective at a time.

    A rank runs until it waits, then another one: ranks that ran at once would wait for Python's lock at every operator.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._turn = threading.Lock()
        """Acquired by the rank that runs. After ``TURN_S``, another one runs beside it, without the lock."""
        self._holder: int | None = None
        """The rank that has acquired the lock."""
        self._changed = threading.Condition()
        """Guards all below. Never held while a rank waits for its turn."""
        self._num_held: Counter[tuple[int, ...]] = Counter()
        """The number of collectives that a group has completed."""
        self._calls: dict[tuple[int, ...], dict[int, Collective]] = {}
        """The calls that wait, by group and rank of the world."""
        self._left: set[int] = set()
        """The ranks that have returned."""
        self._clocks: dict[int, int] = {}
        """The processor clock of each rank's thread."""
        self._failure: BaseException | None = None

    def begin(self, rank: int) -> None:
        """Note the thread that calls this as that of a rank."""
        self._clocks[rank] = time.pthread_getcpuclockid(threading.get_ident())

    def take_turn(self, rank: int) -> None:
        """Wait until no other rank runs, or one has run for long: it may wait for this rank elsewhere."""
        if self._turn.acquire(timeout=TURN_S):
            self._holder = rank

    def pass_turn(self, rank: int) -> None:
        """Let another rank run. A rank that ran beside the holder has nothing to pass."""
        if self._holder == rank:
            self._holder = None
            self._turn.release()

    def meet(self, ranks: tuple[int, ...], rank: int, call: Collective) -> None:
        """Wait until every rank of the group has arrived; the last one copies the data of all."""
        with self._changed:
            num_before = self._num_held[ranks]
            self._arrive(ranks, rank, call)
            if self._num_held[ranks] > num_before:
                return
        self.pass_turn(rank)
        with self._changed:
            self._wait_for(lambda: self._num_held[ranks] > num_before or self._failure is not None)
            was_held = self._num_held[ranks] > num_before
        self.take_turn(rank)
        if not was_held:
            raise _EndedError

    def _wait_for(self, comes: Callable[[], bool]) -> None:
        """Wait for something that other ranks do; fail if it does not come in time and no rank computes."""
        lateness = Lateness(self.timeout_s, lambda rank: time.clock_gettime(self._clocks[rank]))
        wait_s = self.timeout_s
        while not self._changed.wait_for(comes, wait_s):
            all_began = len(self._clocks) == self.size
            computing = self._clocks.keys() - self._left - self._waiting()
            if all_began and not lateness.any_computes(computing):
                if self._calls:
                    self._fail_missing(f"not in {self.timeout_s:g} s")
                else:
                    self._fail_endless()
            wait_s = LOOK_S

    def _waiting(self) -> set[int]:
        """The ranks that wait in a collective."""
        return {rank for calls in self._calls.values() for rank in calls}

    def _arrive(self, ranks: tuple[int, ...], rank: int, call: Collective) -> None:
        """Add a rank's call, and hold the meeting if it is the last one."""
        calls = self._calls.setdefault(ranks, {})
        calls[rank] = call
        if len(calls) == len(ranks):
            self._hold(ranks)
        else:
            self._fail_if_stuck()

    def _hold(self, ranks: tuple[int, ...]) -> None:
        """Copy the data of all ranks of a group. Raises ContractError if they call different collectives."""
        by_rank = self._calls.pop(ranks)
        calls = [by_rank[rank] for rank in ranks]
        if len({call.kind for call in calls}) > 1:
            called = ", ".join(f"rank {rank} {by_rank[rank].kind}" for rank in ranks)
            raise ContractError(f"the ranks call different collectives: {called}.", "Let all call the same.")
        with torch.no_grad():
            _deliver(calls)
        self._num_held[ranks] += 1
        self._changed.notify_all()

    def _fail_if_stuck(self) -> None:
        """Fail once every rank either waits or has returned."""
        if len(self._left | self._waiting()) == self.size:
            self._fail_missing("already returned" if self._left else "the others wait in another group")

    def _fail_endless(self) -> None:
        """Fail with the names of the ranks that neither return nor come to a collective, for which none waits."""
        if self._failure is None:
            endless = _named(sorted(self._clocks.keys() - self._left))
            what = f"{endless} came to no collective, and did not return, in {self.timeout_s:g} s of a processor."
            self._failure = ContractError(what, "Is something polled that does not come?")
            self._changed.notify_all()

    def _fail_missing(self, why: str) -> None:
        """Fail with the names of the missing ranks, if others wait for them."""
        if self._failure is None and self._calls:
            ranks, calls = next(iter(self._calls.items()))
            missing = [rank for rank in ranks if rank not in calls]
            kind = next(iter(calls.values())).kind
            what = f"{_named(missing)} did not come to the {kind} ({why}); waiting there: {_named(sorted(calls))}."
            self._failure = ContractError(what, "Let every rank call every collective.")
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the world with ``error``, unless it has failed already."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """Record that a rank has returned, and fail if all others wait for it."""
        with self._changed:
            self._left.add(rank)
            self._fail_if_stuck()
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return len(self._left) == self.size or self._failure is not None

    def _num_steps(self) -> int:
        """Number of collectives that were held, and of ranks that have returned: it grows while a world advances."""
        return self._num_held.total() + len(self._left)

    def _wait_for_a_step(self) -> None:
        """Wait until the world advances, or is over; fail if neither comes in time and no rank computes."""
        before = self._num_steps()
        self._wait_for(lambda: self._is_over() or self._num_steps() > before)

    def wait_for_all(self) -> None:
        """Wait until every rank has returned. Raise the world's failure, if any."""
        with self._changed:
            while not self._is_over():
                self._wait_for_a_step()
            self._changed.wait_for(lambda: len(self._left) == self.size, GRACE_S)
            if self._failure is not None:
                raise self._failure


def _named(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


class _Done(dist.Work):
    """Work handle of a completed collective."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


_DONE: Final = _Done()


class _MeetingMode(Collectives):
    """Turns every collective of a thread into a meeting with the other threads."""

    def __init__(self, meeting: _Meeting) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meeting = meeting

    def launch(self, collective: Collective) -> Any:
        """Meet the other ranks. Raises ContractError for send and recv, which not all ranks call."""
        if collective.kind in ("send", "recv"):
            raise ContractError(f"a world of threads has no {collective.kind}.", "Use a RankPool.")
        ranks = tuple(members(collective.group))
        self._meeting.meet(ranks, ranks[collective.group.rank()], collective)
        return collective.answer(_DONE)


def _deliver(calls: Sequence[Collective]) -> None:
    """Copy the tensors from each sender to each receiver, or reduce them in rank order."""
    for receiver, call in enumerate(calls):
        if call.operation is None:
            for sender, places in call.places.items():
                _copy(calls[sender].to[receiver], places, f"from rank {sender} to rank {receiver}")
            continue
        places = call.places[receiver]
        _copy(calls[0].to[receiver], places, f"from rank 0 to rank {receiver}")
        for other in calls[1:]:
            for place, part in zip(places, other.to[receiver], strict=True):
                _REDUCE[call.operation](place, part, out=place)


_REDUCE: Final[Mapping[Any, Callable[..., Any]]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def _copy(parts: Sequence[Tensor], places: Sequence[Tensor], route: str) -> None:
    """Copy each part into its place. Raises ContractError with ``route`` if their shapes or dtypes differ."""
    for part, place in zip(parts, places, strict=True):
        if part.shape != place.shape or part.dtype != place.dtype:
            sent, awaited = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (part, place))
            raise ContractError(f"{sent} is sent {route}, which awaits {awaited}.")
        place.detach().copy_(part)
