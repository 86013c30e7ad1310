"""A run is read as a stream, whatever its files hold or lack."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moefw.core.errors import DataError
from moefw.report import buckets
from moefw.report.buckets import MOST_BUCKETS, Buckets
from moefw.report.loads import as_levels, at_most, levels
from moefw.report.reading import Run, read_run
from moefw.training.records.expert_load import Window
from synthetic_run import write_run


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read(run: Path) -> Run:
    return read_run(run, num_windows=16)


def test_every_step_of_a_short_run_is_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=200)
    read_back = read(run).buckets
    for name, path in {"loss": ["loss"], "grad_norms/experts": ["grad_norms", "experts"]}.items():
        told = read_back.columns(name)["mean"]
        for record, value in zip(records(run), told, strict=True):
            for key in path:
                record = record[key]
            assert value == np.float32(record)


def test_a_spike_of_one_step_stays_and_is_named_however_wide_buckets_are() -> None:
    steps = 5 * MOST_BUCKETS
    curves = Buckets()
    for step in range(1, steps + 1):
        curves.add(step, {"loss": 50.0 if step == 1234 else 2.0 + step / steps})
    columns = curves.columns("loss")
    assert curves.width == 8
    assert len(columns["most"]) == curves.size <= MOST_BUCKETS
    assert columns["most"][(1234 - 1) // 8] == 50.0
    assert (columns["most"] == 50.0).sum() == 1
    assert curves.curves["loss"].highest == (50.0, 1234)
    assert np.all(columns["least"] <= columns["mean"])
    assert np.all(columns["mean"] <= columns["most"])


def test_wide_buckets_hold_what_a_second_look_at_all_values_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MOST_BUCKETS", 8)
    random = np.random.default_rng(0)
    values = random.normal(size=61)
    curves = Buckets()
    for step, value in enumerate(values, 5):
        curves.add(step, {"x": float(value), "y": None if step % 2 else 1.0})
    assert curves.width == 8
    parts = [values[begin : begin + 8] for begin in range(0, 61, 8)]
    columns = curves.columns("x")
    np.testing.assert_allclose(columns["least"], [part.min() for part in parts], rtol=1e-6)
    np.testing.assert_allclose(columns["most"], [part.max() for part in parts], rtol=1e-6)
    np.testing.assert_allclose(columns["mean"], [part.mean() for part in parts], rtol=1e-5)
    assert curves.curves["y"].num_missing == 31


def test_a_loss_that_is_not_finite_is_a_gap_and_its_steps_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20)
    lines = records(run)
    for line in lines[4:6]:
        line["loss"] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    loss = read(run).buckets.curves["loss"]
    assert loss.missing == [5, 6]
    assert [place for place, value in enumerate(read(run).buckets.columns("loss")["mean"]) if math.isnan(value)] == [
        4,
        5,
    ]


def test_an_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20)
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-30])
    assert read(run).buckets.last_step == 19


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("{broken", "metrics.jsonl:3: damaged line"),
        ("[1, 2]", "metrics.jsonl:3: damaged line: it has no step"),
        ('{"loss": 1.0}', "metrics.jsonl:3: damaged line: it has no step"),
        ('{"step": 1, "loss": 1.0}', "metrics.jsonl:3: damaged line: step 1 follows step 2"),
    ],
)
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, damage: str, said: str) -> None:
    run = write_run(tmp_path / "run", steps=10)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2] = damage
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=said):
        read(run)


@pytest.mark.parametrize("line", ['{"first": 1}', '{"first": 1, "last": 2, "layers": [1], "load": [[1.0], [1.0]]}'])
def test_a_damaged_window_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    run = write_run(tmp_path / "run", steps=10)
    with (run / "expert_load.jsonl").open("a") as file:
        file.write(f"{line}\n{line}\n")
    with pytest.raises(DataError, match=r"expert_load.jsonl:11: damaged line"):
        read(run)


def test_older_runs_have_the_load_in_their_lines(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=40)
    (run / "expert_load.jsonl").unlink()
    lines = records(run)
    for step, line in enumerate(lines, 1):
        del line["experts"]
        line["expert_load"] = [[1.5, 0.5 + step / 100, 0.0], [1.0, 1.0, 1.0]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read_back = read(run)
    assert read_back.buckets.curves["dead/sum"].last == 1
    assert read_back.buckets.curves["busiest/most"].last == 1.5
    assert 8 < len(read_back.windows) <= 16
    assert read_back.windows[0].first == 1
    assert read_back.windows[-1].last == 40
    assert sum(window.steps * window.load_LE[0, 1] for window in read_back.windows) == pytest.approx(
        sum(0.5 + step / 100 for step in range(1, 41))
    )


def test_merged_windows_are_means_by_step() -> None:
    windows = [Window(step, step, (0,), np.array([[float(step), 0.0]])) for step in range(1, 101)]
    merged = at_most(windows, 7)
    assert len(merged) <= 7
    assert [merged[0].first, merged[-1].last] == [1, 100]
    for window in merged:
        assert window.load_LE[0, 0] == pytest.approx(np.mean(range(window.first, window.last + 1)))


def test_levels_tell_shares_to_a_hundredth_and_dead_experts_apart() -> None:
    scale = levels(37.0)
    shares = np.array([0.0, 1e-6, 0.004, 0.5, 0.997, 1.999, 5.0, 37.0])
    kept = as_levels(shares, scale)
    assert (kept == 0).tolist() == (shares == 0).tolist()
    told = scale[kept]
    np.testing.assert_allclose(told[3:6], shares[3:6], atol=0.0051)
    np.testing.assert_allclose(told[6:], shares[6:], rtol=0.03)
    assert np.all(np.diff(scale) > 0)


def test_a_run_without_experts_events_or_a_spec_is_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    run = read(tmp_path)
    assert run.buckets.num_steps == 1
    assert (run.windows, run.events, run.spec, run.sample) == ([], [], {}, None)


@pytest.mark.parametrize("made", ["nothing", "a file", "no metrics", "empty metrics"])
def test_a_folder_without_a_step_is_refused(tmp_path: Path, made: str) -> None:
    run = tmp_path / "run"
    if made == "a file":
        run.touch()
    elif made != "nothing":
        run.mkdir()
    if made == "empty metrics":
        (run / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="Name the folder of a run that has made a step"):
        read(run)


def test_a_report_imports_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import moefw.report.page, moefw.commands.report"
    subprocess.run([sys.executable, "-c", code], check=True)
