"""Events of a run are appended, and a resume removes none."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from moefw.core.errors import DataError
from moefw.training.records.events import EVENTS, EventLog, read_events


def test_an_event_is_on_disk_at_once_and_later_ones_are_added(tmp_path: Path) -> None:
    for step in (0, 5):
        with EventLog(tmp_path) as log:
            log.write("start", step, ranks=2, layout={"ep": 2})
            assert len((tmp_path / EVENTS).read_text().splitlines()) == step // 5 + 1
    events = list(read_events(tmp_path / EVENTS))
    assert [(event["event"], event["step"], event["ranks"]) for event in events] == [("start", 0, 2), ("start", 5, 2)]
    assert events[0]["time"] <= events[1]["time"]


def test_only_an_event_that_is_cut_off_gives_way_to_the_next(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.write("start", 0)
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"event": "checkp')
    assert [event["event"] for event in read_events(tmp_path / EVENTS)] == ["start"]
    with EventLog(tmp_path) as log:
        log.write("end", 3, outcome="done")
    assert [event["event"] for event in read_events(tmp_path / EVENTS)] == ["start", "end"]


def test_a_number_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.write("evaluation", 1, loss=math.nan)
    assert json.loads((tmp_path / EVENTS).read_text())["loss"] is None


def test_damage_before_the_last_line_is_named(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text('{"event": "start"\n{"event": "end"}\n')
    with pytest.raises(DataError, match=r"events\.jsonl:1: damaged"):
        list(read_events(tmp_path / EVENTS))


def test_records_are_read_without_torch() -> None:
    modules = ("metrics", "experts", "expert_load", "events")
    imports = "; ".join(f"import moefw.training.records.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"import sys; {imports}; assert 'torch' not in sys.modules"], check=True)
