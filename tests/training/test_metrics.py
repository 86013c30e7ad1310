"""Metrics are complete on disk, however a run ends, and are read back unchanged."""

import json
import math
import os

import numpy as np
import pytest

from moefw.core.errors import DataError, RunError
from moefw.training.records.metrics import MetricsLog, read_metrics


def write_steps(run_dir, steps, *, keep_until=None, shift=0.0):
    with MetricsLog(run_dir, keep_until=keep_until) as log:
        for step in steps:
            log.write({"step": step, "loss": 5.0 - step + shift})


def scalars(run_dir, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_what_was_written_is_read_back(tmp_path):
    record = {"step": 3, "loss": np.float32(1.5), "calls": np.int64(7), "load": [[1.0, 2.0], [0.5, 1.5]]}
    with MetricsLog(tmp_path) as log:
        log.write(record)
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [{**record, "loss": 1.5, "calls": 7}]


def test_a_line_is_whole_on_disk_before_the_log_is_closed(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "loss": 2.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":1,"loss":2.0}\n'
    log.close()


def test_resume_forgets_later_steps(tmp_path):
    write_steps(tmp_path, range(1, 6))
    write_steps(tmp_path, range(4, 6), keep_until=3, shift=10.0)
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [4.0, 3.0, 2.0, 11.0, 10.0]
    assert scalars(tmp_path, "loss") == {1: 4.0, 2: 3.0, 3: 2.0, 4: 11.0, 5: 10.0}


def test_tensorboard_forgets_steps_that_are_not_made_again(tmp_path):
    write_steps(tmp_path, range(1, 6))
    write_steps(tmp_path, [4], keep_until=3)
    assert sorted(scalars(tmp_path, "loss")) == [1, 2, 3, 4]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0', "\0\0\0"])
def test_a_torn_last_line_is_passed_over_and_dropped_on_resume(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, [1, 2])
    path.write_text(path.read_text() + torn)
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    write_steps(tmp_path, [3], keep_until=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_log_that_is_continued_without_resume_loses_only_its_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    write_steps(tmp_path, [3])
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]


def test_a_resume_that_dies_while_it_truncates_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, [1, 2, 3])
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written: disk full"):
        MetricsLog(tmp_path, keep_until=1)
    assert path.read_bytes() == before


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: damaged"):
        list(read_metrics(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_what_is_not_finite_becomes_null(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "load": [[1.0, np.float32("nan")]]})
    line = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert strict == {"step": 1, "loss": None, "grad_norm": None, "load": [[1.0, None]]}


def test_tensorboard_holds_the_numbers_and_nothing_else(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path) as log:
        log.write({"step": 7, "loss": 1.25, "eval_loss": 2, "load": [[1.0]], "note": "x", "ok": True})
    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"] == ["loss", "eval_loss"]
    assert scalars(tmp_path, "loss") == {7: 1.25}
    assert scalars(tmp_path, "eval_loss") == {7: 2.0}
