"""The page of a run says what a step was planned to take on its machine, beside what it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moefw.commands import specs
from moefw.planner import cluster, ledger
from moefw.planner.time.forecast import forecast
from moefw.planner.time.software import Software
from moefw.report.blocks import Bars, Section, Table, Words
from moefw.report.page import read_runs
from moefw.report.reading import Run
from moefw.report.sections.planned import section
from moefw.report.words import number
from moefw.training.folder import kept_spec
from small_spec import small_spec
from synthetic_run import write_run

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with the plan of a real spec."""
    assembly = specs.read(str(small_spec(tmp_path)), ())
    run = write_run(tmp_path / "run", steps=9, spec=kept_spec(assembly))
    (run / "ledger.json").write_text(json.dumps({"predicted": ledger(assembly).to_data()}))
    return run


def run_on(folder: Path, computes_on: str) -> Run:
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace("a processor, 1 thread", computes_on))
    (run,) = read_runs([folder])
    return run


def planned(run: Run) -> Section:
    found = section([run], None)
    assert found is not None
    return found


def test_time_and_speed_are_told_by_plan_and_by_clock(folder: Path) -> None:
    run = run_on(folder, H100)
    table, how_sure, bars = planned(run).blocks
    assert isinstance(table, Table)
    assert isinstance(how_sure, Words)
    assert isinstance(bars, Bars)
    assembly = specs.read(str(folder / "spec.yaml"), ())
    expected = forecast(assembly, ledger(assembly), cluster.read("h100"), "h100", Software())
    rows = {name: told for name, *told in table.rows}
    speed = sorted(run.buckets.columns("tokens_per_s")["mean"])[4]
    predicted = expected.tokens / expected.step.step_s
    assert rows["tokens a second"] == [number(predicted), number(speed), number(speed / predicted, 3)]
    assert rows["MFU"][1:] == ["-", "-"]
    assert {name for name, *_ in bars.rows} == expected.step.categories.keys()
    assert "implementation" in how_sure.sentences[0]


def test_a_machine_without_a_cluster_is_named_with_the_command_that_writes_one(folder: Path) -> None:
    (line,) = planned(run_on(folder, "a GPU of tomorrow")).blocks
    assert isinstance(line, Words)
    assert "no cluster has a GPU of tomorrow" in line.sentences[0]
    assert "moefw bench calibrate" in line.sentences[0]


def test_a_plan_of_another_version_is_a_line(folder: Path) -> None:
    (folder / "ledger.json").write_text(json.dumps({"predicted": {"peak_bytes": 1}}))
    (line,) = planned(run_on(folder, H100)).blocks
    assert isinstance(line, Words)
    assert "another version" in line.sentences[0]


def test_a_run_without_a_plan_has_no_such_section(folder: Path) -> None:
    (folder / "ledger.json").unlink()
    assert section([run_on(folder, H100)], None) is None
