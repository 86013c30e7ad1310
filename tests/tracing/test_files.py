"""Files of a trace: lines of each rank, one file of all on one clock, shares, and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from moefw.core.records import Action
from moefw.runtime.pipeline.timeline import one_by_one, timeline
from moefw.tracing.files import TraceFiles, is_trace
from moefw.tracing.picture import MOST_RANKS, draw, rows_of_schedule
from moefw.tracing.rank_file import Head, RankFile, RankTrace, read_ranks
from moefw.tracing.shares import Shares
from moefw.tracing.spans import Span
from moefw.tracing.whole import aligned, events

MS = 1_000_000


def head(rank: int, machine: str = "one", met_ns: tuple[int, ...] = ()) -> Head:
    return Head(rank=rank, world=2, device="cpu", machine=machine, met_ns=met_ns)


def step(begin: int = 0, number: int = 1) -> list[Span]:
    """A step with a forward of one phase, whose dispatch travels while it goes on."""
    of_pass: dict[str, Any] = {"passing": "F", "stage": 0, "micro_batch": 0}
    whole: dict[str, Any] = {"step": number}
    of_group: dict[str, Any] = {"group": "ep", "number": 0}
    return [
        Span(kind="step", name=f"step {number}", begin_ns=begin, end_ns=begin + 10 * MS, **whole),
        Span(kind="pass", name="forward", begin_ns=begin + MS, end_ns=begin + 9 * MS, **whole, **of_pass),
        Span(kind="phase", name="attend", begin_ns=begin + MS, end_ns=begin + 8 * MS, layer=3, **whole, **of_pass),
        Span(
            kind="movement",
            name="dispatch",
            begin_ns=begin + 2 * MS,
            end_ns=begin + 7 * MS,
            nbytes=64,
            layer=3,
            **whole,
            **of_pass,
            **of_group,
        ),
        Span(
            kind="movement",
            name="combine",
            begin_ns=begin + 3 * MS,
            end_ns=begin + 9 * MS,
            nbytes=64,
            **whole,
            **of_pass,
        ),
        Span(
            kind="wait", name="dispatch", begin_ns=begin + 6 * MS, end_ns=begin + 7 * MS, **whole, **of_pass, **of_group
        ),
    ]


def write(folder: Path, rank: int, *steps: list[Span]) -> Path:
    file = RankFile(folder, head(rank))
    for spans in steps:
        file.write(spans)
    file.close()
    return file.path


def test_spans_come_back_from_lines(tmp_path: Path) -> None:
    write(tmp_path, 1, step(), step(20 * MS, number=2))
    write(tmp_path, 0, step())
    first, second = read_ranks(tmp_path)
    assert (first.head.rank, second.head.rank) == (0, 1)
    assert first.spans == step()
    assert second.spans == [*step(), *step(20 * MS, number=2)]
    assert second.spans[1].action == Action("F", 0, 0)


def test_a_line_that_is_cut_off_costs_itself(tmp_path: Path) -> None:
    path = write(tmp_path, 0, step())
    path.write_text(path.read_text()[:-20])
    (rank,) = read_ranks(tmp_path)
    assert rank.spans == step()[:-1]


def test_a_file_without_a_head_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").write_text("")
    (tmp_path / "rank-00001.jsonl").write_text('{"schema": "another"}\n')
    assert read_ranks(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [({"kind": "nap"}, "'nap' is no kind of span"), ({"colour": "red"}, "no 'colour'"), ({"name": None}, "name")],
)
def test_a_line_that_is_no_span_is_refused(change: dict[str, Any], what: str) -> None:
    data = {**step()[0].to_data(), **change}
    data = {name: value for name, value in data.items() if value is not None}
    with pytest.raises(ValueError, match=what):
        Span.of_data(data)


def test_ranks_of_one_machine_have_one_clock() -> None:
    ranks = [RankTrace(head(0, met_ns=(5, 5)), step(100)), RankTrace(head(1, met_ns=(9, 9)), step(103))]
    first, second = aligned(ranks)
    assert first.spans == step(0)
    assert second.spans == step(3)


def test_clocks_of_machines_differ_by_the_median_of_their_meetings() -> None:
    here = RankTrace(head(0, "here", met_ns=(10, 20, 30)), step(100))
    there = RankTrace(head(1, "there", met_ns=(1_010, 1_021, 1_090)), step(1_103))
    first, second = aligned([here, there])
    assert first.spans[0].begin_ns == 0
    assert second.spans[0].begin_ns == 2


def test_no_rank_makes_no_trace(tmp_path: Path) -> None:
    assert aligned([]) == []
    files = TraceFiles(tmp_path / "trace.json")
    assert files.finish() == []
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def finished(tmp_path: Path) -> TraceFiles:
    files = TraceFiles(tmp_path / "trace.json")
    write(files.spans, 0, step())
    write(files.spans, 1, step(MS))
    assert len(files.finish()) == 2
    return files


def test_one_file_holds_a_row_of_compute_and_one_of_the_wire_of_each_rank(finished: TraceFiles) -> None:
    data = json.loads(finished.whole.read_text())
    assert is_trace(finished.whole)
    named = [event for event in data["traceEvents"] if event["ph"] == "M" and event["name"] == "thread_name"]
    rows = [(event["pid"], event["args"]["name"]) for event in named]
    assert rows == [(0, "compute"), (0, "wire"), (1, "compute"), (1, "wire")]


def test_events_follow_the_trace_event_format(finished: TraceFiles) -> None:
    """Complete events of a thread lie in each other; asynchronous ones, which may overlap, are pairs with an id."""
    of_spans = [event for event in json.loads(finished.whole.read_text())["traceEvents"] if event["ph"] != "M"]
    complete = [event for event in of_spans if event["ph"] == "X"]
    assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} == set(complete[0])
    first = [event["name"] for event in complete if event["pid"] == 0]
    assert first == ["step 1", "forward 0F0", "attend, layer 3", "dispatch"]
    assert complete[2]["ts"] == 1000.0
    assert complete[2]["dur"] == 7000.0
    wire = [event for event in of_spans if event["ph"] in "be"]
    begun = {event["id2"]["local"]: event for event in wire if event["ph"] == "b"}
    ended = {event["id2"]["local"]: event for event in wire if event["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert len(begun) == 4
    assert all(begun[key]["name"] == ended[key]["name"] and begun[key]["ts"] < ended[key]["ts"] for key in begun)


def test_shares_are_told_by_rank_and_in_the_mean(finished: TraceFiles) -> None:
    """The dispatch travels from 3 ms on, when rank 1 has launched it, too."""
    data = json.loads(finished.shares.read_text())
    assert data["steps"] == [1]
    assert set(data["ranks"]) == {"0", "1"}
    for shares in (data["mean"], *data["ranks"].values()):
        assert sum(shares[name] for name in ("compute", "hidden", "exposed", "bubble")) == pytest.approx(1.0)
    assert data["ranks"]["0"] == {
        "compute": pytest.approx(0.4),
        "hidden": pytest.approx(0.5),
        "exposed": pytest.approx(0.1),
        "bubble": 0.0,
        "hidden_communication": pytest.approx(0.5 / 0.6),
    }


def colours(path: Path) -> set[str]:
    """Colours of a picture that cover at least a hundred points."""
    counted = Image.open(path).convert("RGB").getcolors(1 << 20)
    assert counted is not None
    return {"#{:02x}{:02x}{:02x}".format(*colour) for number, colour in counted if number >= 100}  # type: ignore[misc]


def test_the_picture_shows_passes_the_wire_and_what_is_exposed(finished: TraceFiles) -> None:
    from moefw.tracing.picture import COLOURS

    drawn = colours(finished.picture)
    assert {COLOURS["forward"], COLOURS["movement"], COLOURS["exposed communication"], "#ffffff"} <= drawn
    assert COLOURS["backward"] not in drawn


def test_a_new_trace_takes_the_place_of_an_earlier_one(finished: TraceFiles) -> None:
    other = finished.spans / "mine.txt"
    other.write_text("mine")
    finished.clear()
    assert [*finished.whole.parent.iterdir()] == [finished.spans]
    assert [*finished.spans.iterdir()] == [other]


def test_a_schedule_of_many_ranks_is_drawn_in_part(tmp_path: Path) -> None:
    rows = rows_of_schedule(timeline([one_by_one(2)], lambda _: 1)) * (2 * MOST_RANKS)
    shares = {"pp 0": Shares(compute=1.0, hidden=0.0, exposed=0.0, bubble=0.0)}
    few, many = tmp_path / "few.png", tmp_path / "many.png"
    draw(few, rows[:MOST_RANKS], shares, title="few", time="passes")
    draw(many, rows, shares, title="many", time="passes")
    assert Image.open(few).height == Image.open(many).height


def test_events_of_no_rank_are_none() -> None:
    assert [*events([])] == []


def test_what_cannot_be_written_is_raised_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = RankFile(tmp_path / "file", head(0))
    file.write(step())
    with pytest.raises(OSError, match="file"):
        file.close()
