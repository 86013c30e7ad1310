"""Finds the rank that blocks a run, and words the message about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from attrs import frozen

from moefw.core.errors import Problem
from moefw.training.faults.kernel import STOPPED
from moefw.training.faults.patience import limit_s
from moefw.training.faults.record import Record

_SPANS_TOLD: Final = 16


@frozen(kw_only=True)
class Seen:
    """A rank as a watcher sees it: ``still_s`` seconds without progress. ``state``: why its process does not run.

    ``heard``: the record came through the store, and may be a second old.
    """

    rank: int
    record: Record
    still_s: float
    state: str = ""
    heard: bool = False

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return bool(self.record.waits_in) and not self.state

    def limit_s(self, timeout_s: float) -> float:
        """Seconds that it may go without progress; a stopped process imports nothing."""
        return limit_s(timeout_s, slow=self.record.slow and self.state != STOPPED)

    @property
    def name(self) -> str:
        """The rank, with its host and pid."""
        return named(self.rank, self.record)

    @property
    def place(self) -> str:
        """Its last known place in the run."""
        return f"last heard of at {self.record.place}" if self.heard and self.state else self.record.place


def named(rank: int, record: Record) -> str:
    """Name of a rank, with its host and pid if known."""
    return f"rank {rank} ({record.host}, pid {record.pid})" if record.pid else f"rank {rank}"


def culprit(ranks: Sequence[Seen], timeout_s: float) -> Seen | None:
    """Rank that all others wait for, or None while the run makes progress.

    A rank that waits in a collective is not blamed while any rank makes progress, as it may wait for that one. A
    process that does not run is blamed first, even if others have waited a little longer, then the rank with the oldest
    stamp.
    """
    working = [seen for seen in ranks if not seen.record.ending]
    late = [seen for seen in working if seen.still_s > seen.limit_s(timeout_s)]
    guilty = [seen for seen in late if not seen.waits]
    if not guilty and len(late) < len(working):
        return None
    halted = [seen for seen in working if seen.state and seen.still_s > seen.limit_s(timeout_s) / 2]
    return max(halted or guilty or late, key=lambda seen: seen.still_s, default=None)


def vanished(ranks: Sequence[Seen]) -> Seen | None:
    """Rank that left without a message. Called when this rank has lost contact with another."""
    gone = [seen for seen in ranks if seen.state and not seen.record.ending]
    return max(gone, key=lambda seen: seen.still_s, default=None)


def left_silently(gone: Seen) -> Problem:
    """Problem of a rank that left without a message."""
    return Problem(f"{gone.name} left without a word, {gone.place}.")


def accusation(hanging: Seen, ranks: Sequence[Seen], timeout_s: float) -> Problem:
    """Problem of a rank that hangs: which rank, where, for how long, and the collectives of the others."""
    limit = hanging.limit_s(timeout_s)
    what = f"{hanging.name} has made no progress for {hanging.still_s:.1f} s (run.timeout_s allows {limit:g}): "
    what += hanging.place
    if hanging.state:
        what += f"; {hanging.state}"
    elif hanging.waits:
        what += f", waiting in {hanging.record.waits_in}, as every rank waits"
    others = defaultdict[str, list[int]](list)
    for seen in ranks:
        if seen.rank != hanging.rank and seen.waits:
            others[seen.record.waits_in].append(seen.rank)
    what += "".join(f"; {_they_wait(waiting)} in {where}" for where, waiting in others.items())
    return Problem(f"{what}.", "Where work takes longer, use a larger run.timeout_s.")


def in_words(numbers: Sequence[int], noun: str = "rank") -> str:
    """``rank 3``, or ``ranks 0-3, 6 and 7``; of more than a few spans, the first and how many others."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    parts: list[str] = []
    for span in spans[:_SPANS_TOLD]:
        parts += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span)
    if others := sum(map(len, spans[_SPANS_TOLD:])):
        parts.append(f"{others:,} more")
    plural = "" if len(numbers) == 1 else "s"
    return f"{noun}{plural} {', '.join(parts[:-1])}{' and ' if parts[1:] else ''}{parts[-1]}"


def _they_wait(ranks: Sequence[int]) -> str:
    return f"{in_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
