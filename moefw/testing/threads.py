"""Many ranks as threads of one process: what they send is computed for all of them, by the dispatchers' own code.

A collective is a meeting: the last rank to come moves the data of all, in memory. So even an asynchronous one is done
when it returns; what overlaps is seen with processes (:class:`moefw.testing.pool.RankPool`), not here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.testing.collectives import Collective, Collectives

_ProcessGroup: Any = dist.ProcessGroup
"""Its stub lacks the group without a backend: every collective of it is a meeting."""
MAX_RANKS = 64
GRACE_S = 5.0
"""How long a world that failed waits for its threads to notice."""


def thread_world(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Return ``function(group, rank, *args)`` of every rank, in rank order; each rank is a thread.

    Raises the first exception of a thread, with its rank as a note; ContractError names the ranks that a collective
    waited for in vain: because they returned, or for ``timeout_s``.
    """
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"a world of threads has 1 to {MAX_RANKS} ranks, not {size}")
    meeting = _Meeting(size, timeout_s)
    answers: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            with _Met(meeting):
                answers[rank] = function(_ProcessGroup(rank, size), rank, *args)
        except _Ended:
            pass
        except BaseException as error:
            error.add_note(f"(on rank {rank} of a world of {size} threads)")
            meeting.fail(error)
        meeting.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _Met(meeting):  # PyTorch notes in one place for all threads whether a mode is on: it is on until the end
            for thread in threads:
                thread.start()
            meeting.wait_for_all()
    finally:
        torch.set_num_threads(cores)
    return answers


class _Ended(BaseException):
    """Unwinds a thread whose world failed elsewhere."""


class _Meeting:
    """Where the ranks of a world meet, one collective after the other."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._changed = threading.Condition()
        self._held = 0
        self._calls: dict[int, Collective] = {}
        self._left: set[int] = set()
        self._failure: BaseException | None = None

    def meet(self, rank: int, call: Collective) -> None:
        """Wait until every rank has come; the last delivers what all of them send."""
        with self._changed:
            self._calls[rank] = call
            number = self._held
            if len(self._calls) == self.size:
                self._hold()
                return
            self._stuck()
            come = self._changed.wait_for(lambda: self._held > number or self._failure is not None, self.timeout_s)
            if not come:
                self._miss(f"not in {self.timeout_s:g} s")
            if self._held == number:
                raise _Ended

    def _hold(self) -> None:
        calls = [self._calls[rank] for rank in range(self.size)]
        if len({call.kind for call in calls}) > 1:
            called = ", ".join(f"rank {rank} {call.kind}" for rank, call in enumerate(calls))
            raise ContractError(f"the ranks call different collectives: {called}.", "Let all call the same.")
        with torch.no_grad():
            _deliver(calls)
        self._calls = {}
        self._held += 1
        self._changed.notify_all()

    def _stuck(self) -> None:
        """Fail once every rank either waits or has returned."""
        if self._left and len(self._left | self._calls.keys()) == self.size:
            self._miss("already returned")

    def _miss(self, why: str) -> None:
        """Fail because of the ranks that are not here, where others wait."""
        if self._failure is None and self._calls:
            missing = [rank for rank in range(self.size) if rank not in self._calls]
            kind = next(iter(self._calls.values())).kind
            what = (
                f"{_named(missing)} did not come to the {kind} ({why}); waiting there: {_named(sorted(self._calls))}."
            )
            self._failure = ContractError(what, "Let every rank call every collective.")
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the world with ``error``, unless it has one."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """Note that a rank has returned: who waits for it waits in vain."""
        with self._changed:
            self._left.add(rank)
            self._stuck()
            self._changed.notify_all()

    def wait_for_all(self) -> None:
        """Return when every rank has; raise why the world failed if it did."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._left) == self.size or self._failure is not None)
            self._changed.wait_for(lambda: len(self._left) == self.size, GRACE_S)
            if self._failure is not None:
                raise self._failure


def _named(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


class _Done(dist.Work):
    """The work of a collective that is done."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


_DONE: Final = _Done()


class _Met(Collectives):
    """Lets every collective of a thread be a meeting with the other threads."""

    def __init__(self, meeting: _Meeting) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meeting = meeting

    def launch(self, collective: Collective) -> Any:
        """Meet the other ranks. Raises ContractError for what not all ranks come to."""
        if collective.kind in ("send", "recv"):
            raise ContractError(f"a world of threads has no {collective.kind}.", "Use a RankPool.")
        self._meeting.meet(collective.group.rank(), collective)
        return collective.answer(_DONE)


def _deliver(calls: Sequence[Collective]) -> None:
    """Copy what goes from each rank to each, or reduce it in rank order."""
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


def _copy(parts: Sequence[Tensor], places: Sequence[Tensor], way: str) -> None:
    for part, place in zip(parts, places, strict=True):
        if part.shape != place.shape or part.dtype != place.dtype:
            sent, awaited = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (part, place))
            raise ContractError(f"{sent} is sent {way}, which awaits {awaited}.")
        place.detach().copy_(part)
