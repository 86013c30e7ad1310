"""Shares of a rank's time: what it computes, what of the wire that hides, and for what it waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import asdict, frozen

from moefw.tracing.rank_file import RankTrace
from moefw.tracing.spans import HOST, TRANSFER, WIRE, Span
from moefw.tracing.whole import Launch, launches, travelling_since

Interval = tuple[float, float]
"""Begin and end."""


@frozen(kw_only=True)
class Shares:
    """Shares of the time of traced steps, which add up to 1.

    ``compute``: nothing of this rank travels. ``hidden``: it computes while something travels. ``exposed``: it waits
    while something travels. ``bubble``: it waits for a rank that is not ready: for the tensors of another stage, or for
    the launch of another rank; or for its own host.
    """

    compute: float
    hidden: float
    exposed: float
    bubble: float

    @property
    def hidden_communication(self) -> float | None:
        """Share of the communication that is hidden. None: there is none."""
        communication = self.hidden + self.exposed
        return self.hidden / communication if communication else None

    def to_data(self) -> dict[str, Any]:
        """The shares as a JSON object."""
        return {**asdict(self), "hidden_communication": self.hidden_communication}


def mean(shares: Sequence[Shares]) -> Shares:
    """Mean over ranks. Raises ValueError if there are none."""
    if not shares:
        raise ValueError("there are no shares")
    sums = {name: sum(getattr(each, name) for each in shares) for name in ("compute", "hidden", "exposed", "bubble")}
    return Shares(**{name: total / len(shares) for name, total in sums.items()})


def shares_of(ranks: Sequence[RankTrace]) -> Mapping[int, Shares]:
    """Shares of each rank that has traced a step, over all of its traced steps. The ranks are aligned."""
    last_launches = launches(ranks)
    shares = {rank.head.rank: _shares(rank.spans, last_launches) for rank in ranks}
    return {rank: each for rank, each in shares.items() if each is not None}


def waits(spans: Sequence[Span], last_launches: Mapping[Launch, int]) -> tuple[list[Interval], list[Interval]]:
    """When a rank waits for others that are not ready, and when it waits for data that travel."""
    not_ready: list[Interval] = []
    exposed: list[Interval] = []
    for span in spans:
        if span.kind != "wait":
            continue
        since_ns = span.end_ns if span.name in (TRANSFER, HOST) else travelling_since(span, last_launches)
        not_ready.append((span.begin_ns, since_ns))
        exposed.append((since_ns, span.end_ns))
    return united(not_ready), united(exposed)


def travels(spans: Sequence[Span], last_launches: Mapping[Launch, int]) -> list[Interval]:
    """When something of a rank travels."""
    return united((travelling_since(span, last_launches), span.end_ns) for span in spans if span.kind in WIRE)


def _shares(spans: Sequence[Span], last_launches: Mapping[Launch, int]) -> Shares | None:
    steps = united((span.begin_ns, span.end_ns) for span in spans if span.kind == "step")
    total = length(steps)
    if not total:
        return None
    not_ready, exposed = (common(steps, waited) for waited in waits(spans, last_launches))
    # While data arrive, a rank may wait for another one besides: it counts once.
    not_ready = without(not_ready, exposed)
    computes = without(steps, united([*not_ready, *exposed]))
    hidden = length(common(computes, travels(spans, last_launches)))
    return Shares(
        compute=(length(computes) - hidden) / total,
        hidden=hidden / total,
        exposed=length(exposed) / total,
        bubble=length(not_ready) / total,
    )


# Sets of moments, as disjoint intervals in order.


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals."""
    union: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Intersection of two unions."""
    both: list[Interval] = []
    ahead, behind = 0, 0
    while ahead < len(first) and behind < len(second):
        begin = max(first[ahead][0], second[behind][0])
        end = min(first[ahead][1], second[behind][1])
        if begin < end:
            both.append((begin, end))
        if first[ahead][1] <= second[behind][1]:
            ahead += 1
        else:
            behind += 1
    return both


def without(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What of the first union is not in the second."""
    left: list[Interval] = []
    for begin, end in first:
        for cut_begin, cut_end in common([(begin, end)], second):
            if begin < cut_begin:
                left.append((begin, cut_begin))
            begin = cut_end
        if begin < end:
            left.append((begin, end))
    return left


def length(union: Iterable[Interval]) -> float:
    """Time in a union."""
    return sum(end - begin for begin, end in union)
