"""Pairs of ranks that are slower than others of their kind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
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
    lines = []
    for kind in kinds:
        all_pairs = Counter(rank for pair in kind.pairs for rank in pair.ranks)
        slow_pairs = Counter(rank for pair in kind.slow for rank in pair.ranks)
        slow_ranks = [rank for rank, slow in sorted(slow_pairs.items()) if slow > 1 and 2 * slow > all_pairs[rank]]
        hosts = {rank: host for pair in kind.pairs for rank, host in zip(pair.ranks, pair.hosts, strict=True)}
        where = f"in {kind.axes}, {'across machines' if kind.across else 'within a machine'}"
        medians = f"{_times(kind.latency_us, kind.gb_per_s)} is the median"
        for rank in slow_ranks:
            others = f"{slow_pairs[rank]} of {all_pairs[rank]} others"
            latency_us = statistics.median_low([pair.latency_us for pair in kind.slow if rank in pair.ranks])
            gb_per_s = statistics.median_low([pair.gb_per_s for pair in kind.slow if rank in pair.ranks])
            named = f"rank {rank} ({hosts[rank]}) is slow with {others} {where}"
            lines.append(f"{named}: {_times(latency_us, gb_per_s)}, where {medians}")
        for pair in kind.slow:
            if not any(rank in slow_ranks for rank in pair.ranks):
                (first, second), (host, other_host) = pair.ranks, pair.hosts
                named = f"ranks {first} ({host}) and {second} ({other_host}) are slow {where}"
                lines.append(f"{named}: {_times(pair.latency_us, pair.gb_per_s)}, where {medians}")
    return lines


def _times(latency_us: float, gb_per_s: float) -> str:
    return f"{latency_us:,.1f} microseconds and {gb_per_s:,.2f} GB/s"
