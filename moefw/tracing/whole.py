"""The trace of all ranks: their spans on one clock, and as a file for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from attrs import evolve

from moefw.tracing.rank_file import RankTrace
from moefw.tracing.spans import COMPUTE, WIRE, Span

ROWS: Final = {"compute": 0, "wire": 1}
"""The rows of a rank, as numbers of threads."""
Launch = tuple[int, str, int]
"""Step, group and number: what all ranks of a collective call it."""


def aligned(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Ranks with their spans on the clock of the first, from the begin of the first span on.

    Ranks of one machine have one clock. Those of others left each of a few meetings at nearly the same moment as the
    first: the median of the differences is that of the clocks.
    """
    if not ranks:
        return []
    first = ranks[0].head
    moved = []
    for rank in ranks:
        ahead = 0
        if rank.head.machine != first.machine:
            ahead = round(median(own - other for own, other in zip(rank.head.met_ns, first.met_ns)))
        moved.append(_moved(rank, -ahead))
    begin = min((span.begin_ns for rank in moved for span in rank.spans), default=0)
    return [_moved(rank, -begin) for rank in moved]


def _moved(rank: RankTrace, by_ns: int) -> RankTrace:
    spans = [evolve(span, begin_ns=span.begin_ns + by_ns, end_ns=span.end_ns + by_ns) for span in rank.spans]
    return RankTrace(rank.head, spans)


def launches(ranks: Sequence[RankTrace]) -> Mapping[Launch, int]:
    """When the last rank has launched each collective, so that data of all could travel."""
    last: dict[Launch, int] = {}
    for rank in ranks:
        for span in rank.spans:
            if span.kind in WIRE and span.group is not None and span.number is not None:
                launch = span.step, span.group, span.number
                last[launch] = max(last.get(launch, span.begin_ns), span.begin_ns)
    return last


def travelling_since(span: Span, last_launches: Mapping[Launch, int]) -> int:
    """When the data of a span of the wire, or of a wait for one, began to travel: at the launch of the last rank."""
    if span.group is None or span.number is None:
        return span.begin_ns
    launch = last_launches.get((span.step, span.group, span.number), span.begin_ns)
    return min(max(span.begin_ns, launch), span.end_ns)


def events(ranks: Sequence[RankTrace]) -> Iterator[dict[str, Any]]:
    """Yield the events of the Trace Event Format, which Perfetto and ``chrome://tracing`` show.

    A rank is a process with a row of compute, whose spans lie in each other, and one of the wire, whose spans overlap.
    """
    for rank in ranks:
        pid = rank.head.rank
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for row, tid in ROWS.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}}
        for number, span in enumerate(rank.spans):
            event = {"name": span.title, "cat": span.kind, "pid": pid, "args": _arguments(span)}
            if span.kind in COMPUTE:
                duration = (span.end_ns - span.begin_ns) / 1e3
                yield {"ph": "X", **event, "tid": ROWS["compute"], "ts": span.begin_ns / 1e3, "dur": duration}
            else:
                # Spans of one thread may not overlap unless one lies in the other; asynchronous ones may.
                wire = {**event, "tid": ROWS["wire"], "cat": "wire", "id2": {"local": f"{pid}-{number}"}}
                yield {"ph": "b", **wire, "ts": span.begin_ns / 1e3}
                yield {"ph": "e", **wire, "ts": span.end_ns / 1e3}


def _arguments(span: Span) -> dict[str, Any]:
    times = ("name", "begin_ns", "end_ns")
    return {name: value for name, value in span.to_data().items() if name not in times}
