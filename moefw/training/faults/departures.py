"""Ranks that have left: the problems to report, and the outcome of the run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from attrs import frozen

from moefw.core.errors import Problem
from moefw.training.faults.blame import in_words, named
from moefw.training.faults.record import Record


@frozen(kw_only=True)
class Departed:
    """A rank whose process ended. ``code``: its exit code, or minus the signal that ended it."""

    rank: int
    record: Record
    code: int

    @property
    def well(self) -> bool:
        """Whether it ended after the run was done."""
        return self.code == 0 and self.record.ending == "done"


@frozen(kw_only=True)
class Outcome:
    """Outcome of the run: an exit ``code``, and the ``problem`` if no rank has reported it."""

    code: int
    problem: Problem | None = None


def outcome(gone: Sequence[Departed], *, oom_kills: int, memory_note: Callable[[], str]) -> Outcome | None:
    """Outcome of the run by the ranks that left; None if these left well or had only lost contact.

    A rank ended by a signal comes first, then one out of memory, one without a message, and one that reported why.
    ``oom_kills``: processes that the kernel has killed for memory during the run. ``memory_note`` returns the planned
    and the available memory.
    """
    for each in gone:
        if each.code < 0:
            return Outcome(code=1, problem=_killed(each, oom_kills, memory_note))
    for each in gone:
        if each.record.ending == "memory":
            return Outcome(code=1, problem=out_of_memory(each.rank, each.record, memory_note))
    for each in gone:
        if each.record.ending in ("", "done") and not each.well:
            return Outcome(code=1, problem=left_early(each.rank, each.record, each.code))
    told = [each.code or 1 for each in gone if each.record.ending == "told"]
    return Outcome(code=max(told)) if told else None


def left_early(rank: int, record: Record, code: object) -> Problem:
    """Problem of a rank that leaves before the run is done."""
    shown = 0 if code is None else code
    return Problem(f"{named(rank, record)} left with exit code {shown} at {record.place}, before the run was done.")


def out_of_memory(rank: int, record: Record, memory_note: Callable[[], str]) -> Problem:
    """Problem of a rank that ran out of memory."""
    return Problem(f"{named(rank, record)} ran out of memory at {record.place}. {memory_note()}")


def lost_contact(gone: Sequence[Departed]) -> Problem:
    """Problem of ranks that lost contact while none reports why."""
    who = in_words([each.rank for each in gone])
    return Problem(f"{who} lost contact with the others at {gone[0].record.place}, and none says why.")


def _killed(departed: Departed, oom_kills: int, memory_note: Callable[[], str]) -> Problem:
    record = departed.record
    number = signal.Signals(-departed.code)
    what = f"rank {departed.rank} was ended by {number.name} at {record.place} ({record.host}, pid {record.pid})."
    if number == signal.SIGKILL and oom_kills:
        processes = "1 process" if oom_kills == 1 else f"{oom_kills} processes"
        what += f" Memory had run out: the kernel killed {processes} for it. {memory_note()}"
    return Problem(what)
