"""Shares of a rank's time: by hand, and against the virtual clock on any log of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefw.tracing.rank_file import Head, RankTrace
from moefw.tracing.shares import Shares, common, length, mean, shares_of, united, without
from moefw.tracing.spans import HOST, TRANSFER, Kind, Span
from step_log import Event
from virtual_clock import replay


def span(kind: Kind, begin: int, end: int, name: str = "", **more: object) -> Span:
    return Span(kind=kind, name=name or kind, begin_ns=begin, end_ns=end, step=1, **more)  # type: ignore[arg-type]


def rank(number: int, *spans: Span) -> RankTrace:
    return RankTrace(Head(rank=number, world=2, device="cpu", machine="one", met_ns=()), spans)


def of_one(*spans: Span) -> Shares:
    return shares_of([rank(0, *spans)])[0]


def test_what_is_computed_beside_the_wire_is_hidden() -> None:
    shares = of_one(span("step", 0, 100), span("movement", 20, 60), span("wait", 50, 60, "movement"))
    assert shares == Shares(compute=0.6, hidden=0.3, exposed=0.1, bubble=0.0)
    assert shares.hidden_communication == pytest.approx(0.75)


def test_a_wait_for_another_stage_or_for_the_host_is_a_bubble() -> None:
    shares = of_one(span("step", 0, 10), span("wait", 2, 4, TRANSFER), span("wait", 5, 6, HOST))
    assert shares == Shares(compute=0.7, hidden=0.0, exposed=0.0, bubble=0.3)
    assert shares.hidden_communication is None


def test_rows_travel_from_the_launch_of_the_last_rank_on() -> None:
    """Rank 0 launches at 10 and waits from 20; rank 1 launches at 30. Until then rank 0 waits for rank 1."""
    of_group = {"group": "ep", "number": 0}
    early = rank(
        0, span("step", 0, 100), span("movement", 10, 50, **of_group), span("wait", 20, 50, "movement", **of_group)
    )
    late = rank(
        1, span("step", 0, 100), span("movement", 30, 50, **of_group), span("wait", 40, 50, "movement", **of_group)
    )
    shares = shares_of([early, late])
    assert shares[0] == Shares(compute=0.7, hidden=0.0, exposed=0.2, bubble=0.1)
    assert shares[1] == Shares(compute=0.8, hidden=0.1, exposed=0.1, bubble=0.0)


def test_what_lies_outside_of_steps_is_in_no_share() -> None:
    inside = [span("step", 0, 10), span("step", 20, 30)]
    assert of_one(*inside, span("movement", 8, 22)) == Shares(compute=0.8, hidden=0.2, exposed=0.0, bubble=0.0)


def test_a_rank_without_a_step_has_no_shares() -> None:
    assert shares_of([rank(0)]) == {}


def test_the_mean_of_ranks_adds_up_to_one() -> None:
    both = mean(
        [
            Shares(compute=1.0, hidden=0.0, exposed=0.0, bubble=0.0),
            Shares(compute=0.5, hidden=0.25, exposed=0.125, bubble=0.125),
        ]
    )
    assert both == Shares(compute=0.75, hidden=0.125, exposed=0.0625, bubble=0.0625)
    with pytest.raises(ValueError, match="no shares"):
        mean([])


TIMES = st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))
SETS = st.lists(TIMES, max_size=8)


@given(SETS, SETS)
def test_sets_of_moments_are_those_of_their_points(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    def points(intervals: list[tuple[int, int]]) -> set[int]:
        return {point for begin, end in intervals for point in range(begin, end)}

    one, other = united(first), united(second)
    assert points(one) == points(first)
    assert length(one) == len(points(first))
    assert points(common(one, other)) == points(first) & points(second)
    assert points(without(one, other)) == points(first) - points(second)


KINDS = st.sampled_from(["movement", "gather", "reduction", "collective", "wait", "phase", "pass"])


@given(st.lists(st.tuples(KINDS, TIMES, st.sampled_from([TRANSFER, HOST, "dispatch"]), st.integers(0, 2)), max_size=12))
def test_shares_always_add_up_to_one(drawn: list[tuple[Kind, tuple[int, int], str, int]]) -> None:
    spans = [span(kind, *times, name, group="g", number=number) for kind, times, name, number in drawn]
    ranks = shares_of([rank(0, span("step", 0, 60), *spans[::2]), rank(1, span("step", 5, 70), *spans[1::2])])
    for shares in ranks.values():
        parts = (shares.compute, shares.hidden, shares.exposed, shares.bubble)
        assert all(-1e-12 <= part <= 1 + 1e-12 for part in parts)
        assert sum(parts) == pytest.approx(1.0)


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """The log of a step: compute, movements and the waits for them, and reads of metadata."""
    events: list[Event] = []
    under_way: list[int] = []
    for number in range(draw(st.integers(1, 6))):
        events.append(Event("compute", seconds=draw(st.integers(1, 9))))
        events.append(Event("launch", movement=number, nbytes=draw(st.integers(1, 9))))
        under_way.append(number)
        while under_way and draw(st.booleans()):
            events.append(Event("compute", seconds=draw(st.integers(0, 9))))
            waited = under_way.pop(draw(st.integers(0, len(under_way) - 1)))
            events.append(Event("wait", movement=waited))
    events += [Event("wait", movement=number) for number in under_way]
    return events


def traced_on_virtual_clock(events: list[Event]) -> list[Span]:
    """The spans that a trace would have of a log in which a byte travels for a second, on one wire in order."""
    now = wire_is_free = 0
    arrives: dict[int, int] = {}
    spans: list[Span] = []
    for event in events:
        if event.kind == "compute":
            now += int(event.seconds)
        elif event.kind == "launch":
            begin = max(now, wire_is_free)
            wire_is_free = arrives[event.movement] = begin + event.nbytes
            spans.append(span("movement", begin, wire_is_free))
        else:
            arrived = max(now, arrives[event.movement])
            spans.append(span("wait", now, arrived, "movement"))
            now = arrived
    return [span("step", 0, now), *spans]


@given(logs())
def test_shares_equal_those_of_the_event_log(events: list[Event]) -> None:
    replayed = replay(events, lambda event: event.nbytes)
    shares = of_one(*traced_on_virtual_clock(events))
    assert shares.compute + shares.hidden == pytest.approx(replayed.compute / replayed.total)
    assert shares.exposed == pytest.approx(replayed.exposed / replayed.total)
    assert shares.hidden_communication == pytest.approx(replayed.hidden)
    assert shares.bubble == 0.0
