"""Many ranks as threads of one process: what they send is computed for all of them, by the dispatchers' own code.

A collective is a meeting: the last rank to come moves the data of all, in memory. So even an asynchronous one is done
when it returns; what overlaps is seen with processes (:class:`moefw.testing.pool.RankPool`), not here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.core.errors import ContractError

_ProcessGroup: Any = dist.ProcessGroup
"""Its methods are overloaded, and named otherwise in each version of torch."""

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
            answers[rank] = function(ThreadGroup(meeting, rank), rank, *args)
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
        self._calls: dict[int, tuple[str, Any]] = {}
        self._left: set[int] = set()
        self._failure: BaseException | None = None

    def meet(self, rank: int, kind: str, call: Any, complete: Callable[[list[Any]], None]) -> None:
        """Wait until every rank has come; the last runs ``complete`` with the calls of all, in rank order."""
        with self._changed:
            self._calls[rank] = (kind, call)
            number = self._held
            if len(self._calls) == self.size:
                self._hold(complete)
                return
            self._stuck()
            come = self._changed.wait_for(lambda: self._held > number or self._failure is not None, self.timeout_s)
            if not come:
                self._miss(f"not in {self.timeout_s:g} s")
            if self._held == number:
                raise _Ended

    def _hold(self, complete: Callable[[list[Any]], None]) -> None:
        kinds = [self._calls[rank][0] for rank in range(self.size)]
        if len(set(kinds)) > 1:
            called = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
            raise ContractError(f"the ranks call different collectives: {called}.", "Let all call the same.")
        with torch.no_grad():
            complete([self._calls[rank][1] for rank in range(self.size)])
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
            kind = next(kind for kind, _ in self._calls.values())
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


class _Done:
    """The work of a collective that is done."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


class ThreadGroup(_ProcessGroup):  # type: ignore[misc]
    """The group of one rank of a world of threads. Collectives that it lacks raise: there is no backend behind."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Send each split to its rank; no splits: equal ones."""
        parts = input.split(input_splits or [len(input) // self.size()] * self.size())
        places = output.split(output_splits or [len(output) // self.size()] * self.size())
        return self._meet("all-to-all", (places, parts), _all_to_all)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Put the input of every rank into each output."""
        return self.allgather([list(output.view(self.size(), *input.shape).unbind())], [input])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Put the input of every rank into each list of outputs."""
        (places,), (part,) = outputs, inputs
        return self._meet("all-gather", (places, [part] * self.size()), _all_to_all)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        """Reduce each rank's part of the inputs, in rank order."""
        return self.reduce_scatter([output], [list(input.view(self.size(), *output.shape).unbind())], opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Reduce each rank's part of the inputs, in rank order."""
        (place,), (parts,) = outputs, inputs
        return self._meet("reduce-scatter", (place, parts, opts.reduceOp.op), _reduce_scatter)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce the tensors of all ranks in place, in rank order."""
        (tensor,) = tensors
        parts = [tensor.clone()] * self.size()
        return self._meet("all-reduce", (tensor, parts, opts.reduceOp.op), _reduce_scatter)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self._meet("barrier", None, lambda calls: None)

    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _meet(self, kind: str, call: Any, complete: Callable[[list[Any]], None]) -> _Done:
        self._meeting.meet(self.rank(), kind, call, complete)
        return _Done()


def _all_to_all(calls: list[Any]) -> None:
    for receiver, (places, _) in enumerate(calls):
        for sender, (place, (_, parts)) in enumerate(zip(places, calls, strict=True)):
            _copy(parts[receiver], place, f"from rank {sender} to rank {receiver}")


def _reduce_scatter(calls: list[Any]) -> None:
    reduce: dict[Any, Callable[..., Any]] = {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.MIN: torch.minimum,
    }
    for receiver, (place, _, operation) in enumerate(calls):
        for sender, (_, parts, _) in enumerate(calls):
            if sender == 0:
                _copy(parts[receiver], place, f"from rank 0 to rank {receiver}")
            else:
                reduce[operation](place, parts[receiver], out=place)


def _copy(part: Tensor, place: Tensor, way: str) -> None:
    if part.shape != place.shape or part.dtype != place.dtype:
        sent, awaited = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (part, place))
        raise ContractError(f"{sent} is sent {way}, which awaits {awaited}.")
    place.detach().copy_(part)
