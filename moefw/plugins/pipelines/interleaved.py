"""``interleaved``: 1F1B with several stages a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeGuard

from attrs import field, frozen
from attrs.validators import ge

import moefw
from moefw.core.plugin import PipelinePlugin
from moefw.core.records import Entry, Order


@frozen
class Interleaved(PipelinePlugin):
    """1F1B with ``chunks`` stages a rank, ``ranks`` apart (arXiv 2104.04473): bubbles are ``chunks`` times shorter.

    More micro-batches are held than in ``1f1b``, and sent ``chunks`` times as often. With ``merged``, each forward
    behind the first ones runs beside the backward that would follow the forward before it.
    """

    name: ClassVar[str] = "interleaved"

    chunks: int = field(default=2, validator=ge(2), kw_only=True)
    """Number of stages of a rank."""
    merged: bool = field(default=False, kw_only=True)
    """Whether a forward and a backward in turn run phase by phase: one computes while rows of the other travel."""

    @property
    def merges(self) -> bool:
        """Whether passes are merged."""
        return self.merged

    def check_batches(self, ranks: int, micro_batches: int) -> Iterator[moefw.Problem]:
        """Yield a problem of micro-batches that are no multiple of the rounds, each of ``ranks`` or slightly more."""
        rounds = _rounds(ranks, micro_batches)
        if micro_batches % rounds == 0:
            return
        around = range(micro_batches - ranks, micro_batches + ranks + 1)
        fitting = (number for number in around if number % _rounds(ranks, number) == 0)
        nearest = min(fitting, key=lambda number: abs(number - micro_batches))
        yield moefw.Problem(
            f"interleaved runs micro-batches in {rounds} rounds, which do not divide {micro_batches} of them.",
            f"Use {nearest} micro-batches a step, or use: 1f1b.",
        )

    def order(self, ranks: int, micro_batches: int) -> Order:
        """Order of torch's ``ScheduleInterleaved1F1B``, without torch, which takes seconds to import.

        Raises ValueError for micro-batches that are no whole rounds.
        """
        rounds = _rounds(ranks, micro_batches)
        if micro_batches % rounds:
            raise ValueError(f"{rounds} rounds do not divide {micro_batches} micro-batches")
        orders = [self._order_of(rank, ranks, micro_batches, micro_batches // rounds) for rank in range(ranks)]
        return [_paired(order) for order in orders] if self.merged else orders

    def _order_of(self, rank: int, ranks: int, micro_batches: int, of_round: int) -> list[Entry]:
        """Passes of a rank: forwards alone, a forward and a backward in turn, backwards alone.

        ``of_round``: the micro-batches of a round, all of which run through a chunk before the next chunk runs.
        """
        count = self.chunks * micro_batches
        forwards: list[Entry] = []
        backwards: list[Entry] = []
        for number in range(count):
            turn, place = divmod(number, of_round)
            round_number, chunk = divmod(turn, self.chunks)
            micro_batch = round_number * of_round + place
            last = self.chunks - 1
            forwards.append(moefw.Action("F", chunk * ranks + rank, micro_batch))
            backwards.append(moefw.Action("B", (last - chunk) * ranks + rank, micro_batch))
        alone = min(count, (self.chunks - 1) * of_round + 2 * (ranks - 1 - rank))
        in_turn = (entry for both in zip(forwards[alone:], backwards, strict=False) for entry in both)
        return [*forwards[:alone], *in_turn, *backwards[count - alone :]]


def _paired(passes: Sequence[Entry]) -> list[Entry]:
    """Passes with each backward beside the forward behind it.

    The forward before the first backward had been its partner in 1F1B. It runs alone now, one more at the begin.
    """
    paired: list[Entry] = []
    for entry in passes:
        before = paired[-1] if paired else None
        if _is(entry, "F") and _is(before, "B"):
            paired[-1] = moefw.Pair(forward=entry, backward=before)
        else:
            paired.append(entry)
    return paired


def _is(entry: Entry | None, kind: str) -> TypeGuard[moefw.Action]:
    return isinstance(entry, moefw.Action) and entry.kind == kind


def _rounds(ranks: int, micro_batches: int) -> int:
    """Number of rounds, in each of which every chunk of a rank runs equally many micro-batches."""
    return max(1, micro_batches // ranks)


@moefw.hookimpl
def moefw_pipelines() -> list[type[PipelinePlugin]]:
    """Declare the schedule."""
    return [Interleaved]
