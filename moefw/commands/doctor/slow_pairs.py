"""Pairs of ranks that are slower than others of their kind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from attrs import frozen

SLOW: Final = 2.0
"""A pair is slow if it takes this multiple of the median of its kind.

Pairs of one kind have equal links, and differ by tens of per cent with switches and load; a link that has lost half of
its lanes, or traffic that takes a way round, costs a factor of two.
"""


@frozen(kw_only=True)
class Pair:
    """Two ranks of a group. ``axes``: those along which the group lies, in words."""

    axes: str
    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_us: float
    gb_per_s: float

    @property
    def across(self) -> bool:
        """Whether the two are on different machines."""
        return self.hosts[0] != self.hosts[1]


@frozen(kw_only=True)
class Kind:
    """Pairs that have equal links if nothing is wrong: of the same axes, all within a machine or all across."""

    axes: str
    across: bool
    pairs: Sequence[Pair]

    @property
    def latency_us(self) -> float:
        """Median; of an even number the better one in the middle: a slow one of four ranks is in half of the pairs."""
        return statistics.median_low([pair.latency_us for pair in self.pairs])

    @property
    def gb_per_s(self) -> float:
        """Median; of an even number the better one in the middle."""
        return statistics.median_high([pair.gb_per_s for pair in self.pairs])

    @property
    def slow(self) -> list[Pair]:
        """Pairs that take ``SLOW`` times the median, by latency or by bandwidth."""
        latest_us = SLOW * self.latency_us
        lowest_gb_per_s = self.gb_per_s / SLOW
        return [pair for pair in self.pairs if pair.latency_us > latest_us or pair.gb_per_s < lowest_gb_per_s]


def kinds_of(pairs: Iterable[Pair]) -> list[Kind]:
    """Pairs by kind, in the order in which kinds occur."""
    by_kind: dict[tuple[str, bool], list[Pair]] = {}
    for pair in pairs:
        by_kind.setdefault((pair.axes, pair.across), []).append(pair)
    return [Kind(axes=axes, across=across, pairs=of_kind) for (axes, across), of_kind in by_kind.items()]


def complaints(kinds: Iterable[Kind]) -> list[str]:
    """Lines that name the slow: ranks that are slow with most others, and the pairs that this does not explain."""
    return [line for kind in kinds for line in _complaints_of(kind)]


def _complaints_of(kind: Kind) -> Iterator[str]:
    where = f"in {kind.axes}, {'across machines' if kind.across else 'within a machine'}"
    medians = f"{_times(kind.latency_us, kind.gb_per_s)} is the median"
    slow_ranks = _slow_ranks(kind)
    for rank in slow_ranks:
        slow = [pair for pair in kind.slow if rank in pair.ranks]
        num_others = sum(rank in pair.ranks for pair in kind.pairs)
        latency_us = statistics.median_low([pair.latency_us for pair in slow])
        gb_per_s = statistics.median_low([pair.gb_per_s for pair in slow])
        named = f"{_named(slow[0])[rank]} is slow with {len(slow)} of {num_others} others"
        yield f"rank {named} {where}: {_times(latency_us, gb_per_s)}, where {medians}"
    for pair in kind.slow:
        if not any(rank in slow_ranks for rank in pair.ranks):
            named = " and ".join(_named(pair).values())
            yield f"ranks {named} are slow {where}: {_times(pair.latency_us, pair.gb_per_s)}, where {medians}"


def _slow_ranks(kind: Kind) -> list[int]:
    """Ranks in several slow pairs that are more than half of their pairs, in ascending order."""
    all_pairs = Counter(rank for pair in kind.pairs for rank in pair.ranks)
    slow_pairs = Counter(rank for pair in kind.slow for rank in pair.ranks)
    return sorted(rank for rank, number in slow_pairs.items() if number > 1 and 2 * number > all_pairs[rank])


def _named(pair: Pair) -> dict[int, str]:
    """Each rank of a pair, with its machine."""
    return {rank: f"{rank} ({host})" for rank, host in zip(pair.ranks, pair.hosts, strict=True)}


def _times(latency_us: float, gb_per_s: float) -> str:
    return f"{latency_us:,.1f} microseconds and {gb_per_s:,.2f} GB/s"
