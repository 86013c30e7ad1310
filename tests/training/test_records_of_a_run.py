"""A run records what happened to it, and where its values came from."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moefw.commands import specs
from moefw.core.errors import RunError
from moefw.training import trainer
from moefw.training.errors import StoppedError
from moefw.training.faults.requests import StopRequests
from moefw.training.records.ending import RecordedEnd
from moefw.training.records.events import EVENTS, EventLog, read_events
from moefw.training.records.expert_load import EXPERT_LOAD, read_expert_load
from moefw.training.records.metrics import METRICS, read_metrics
from moefw.training.records.origins import ORIGINS, read_origins
from moefw.training.resume import Which
from moefw.training.world import Place
from small_spec import small_spec


def train(spec: Path, *overrides: str, resume: Which | None = None, requests: StopRequests | None = None) -> None:
    trainer.train(specs.read(str(spec), overrides), Place(0, 1, 0, 1), resume=resume, requests=requests)


def events(run: Path) -> list[dict[str, Any]]:
    return list(read_events(run / EVENTS))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    os.environ["MOEFW_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["MOEFW_CACHE"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    """A run of 4 steps, stopped by a signal after the first of them, whose later steps are lost, and resumed."""
    folder = tmp_path_factory.mktemp("run")
    spec = small_spec(folder, steps=4, eval_every=2)
    requests = StopRequests(resumable=lambda: False)
    requests.asked = signal.SIGTERM
    with pytest.raises(StoppedError):
        train(spec, requests=requests)
    with (folder / "run" / METRICS).open("a") as lines:
        lines.write('{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.LossSpikes, "warning", lambda self, step, loss: "a spike" if step == 2 else "")
        train(spec, "train.lr=0.01", resume="last")
    return folder / "run"


def test_each_event_is_there_in_its_order(run: Path) -> None:
    assert [(event["event"], event["step"]) for event in events(run)] == [
        ("start", 0),
        ("checkpoint", 1),
        ("stop", 1),
        ("end", 1),
        ("resume", 1),
        ("loss_spike", 2),
        ("evaluation", 2),
        ("evaluation", 4),
        ("checkpoint", 4),
        ("end", 4),
    ]


def test_the_start_says_what_runs_where(run: Path) -> None:
    start = events(run)[0]
    assert start["versions"].keys() >= {"moefw", "python", "torch"}
    assert start["machine"]["device"] == "cpu"
    assert start["machine"]["cores"] >= 1
    assert start["machine"]["computes_on"].startswith(start["machine"]["name"])
    assert (start["ranks"], start["layout"]) == (1, {})
    assert (start["moe_layers"], start["experts"], start["top_k"], start["tokens_per_step"]) == ([0], 4, 2, 512)


def test_a_resume_says_from_where_and_what_it_lost(run: Path) -> None:
    resume = next(event for event in events(run) if event["event"] == "resume")
    assert resume["checkpoint"] == "checkpoints/step-1"
    assert resume["lost_steps"] == 1
    assert resume["layout_before"] == {}
    assert [change.split(":")[0] for change in resume["changes"]] == ["train.lr"]


def test_what_is_done_aside_has_its_seconds_in_its_event(run: Path) -> None:
    for event in events(run):
        if event["event"] in ("checkpoint", "evaluation"):
            assert event["seconds"] > 0
    evaluation = next(event for event in events(run) if event["event"] == "evaluation")
    assert evaluation["bits_per_byte"] > 0
    assert 0 < evaluation["zlib_bits_per_byte"] < 8


def test_an_end_has_its_reason_and_the_memory(run: Path) -> None:
    stopped, done = (event for event in events(run) if event["event"] == "end")
    assert stopped["outcome"] == "stopped"
    assert "stopped by a signal after step 1" in stopped["reason"]
    assert (done["outcome"], done["reason"], done["memory"]["of"]) == ("done", "", "process")
    assert done["memory"]["peak_bytes"] > 2**20


def test_a_line_tells_times_norms_and_experts(run: Path) -> None:
    lines = list(read_metrics(run / METRICS))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(before["time"] <= after["time"] for before, after in pairwise(lines))
    for line in lines:
        assert line["seconds"].keys() == {"data", "forward", "backward", "gradients", "results", "optimizer", "other"}
        assert sum(line["seconds"].values()) > 0
        assert line["grad_norms"].keys() == {"routers", "experts", "attention", "rest"}
        assert line["experts"].keys() == {"busiest", "idlest", "dead", "load_entropy", "router_entropy"}
        assert all(len(of_layers) == 1 for of_layers in line["experts"].values())
        assert 0 < line["experts"]["router_entropy"][0] <= 1
        assert "expert_load" not in line
        assert line["load_max_over_mean"] == pytest.approx(line["experts"]["busiest"][0], rel=1e-3)


def test_the_load_of_the_steps_is_kept_beside_the_lines(run: Path) -> None:
    windows = list(read_expert_load(run / EXPERT_LOAD))
    assert [(window.first, window.last) for window in windows] == [(step, step) for step in (1, 2, 3, 4)]
    for window, line in zip(windows, read_metrics(run / METRICS), strict=True):
        assert window.load_LE.max() == pytest.approx(line["experts"]["busiest"][0], rel=1e-3)


def test_origins_are_those_of_the_last_command(run: Path) -> None:
    origins = read_origins(run / ORIGINS)
    assert origins["train.lr"] == "command line"
    assert origins["train.steps"] == f"{run}.yaml:1"
    assert origins["train.clip_norm"] == "default"


def test_a_value_of_a_preset_says_so(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: {preset: qwen3-30b-a3b-tiny}\nrouting:\n  balance: [{kind: aux_loss}]\ntrain: {steps: 2}\n")
    assembly = specs.read(str(path), ["memory=[{use: recompute, regions: [router]}]"])
    origins = assembly.origins.of(assembly.resolved())
    assert origins["model.num_experts"] == "preset qwen3-30b-a3b-tiny"
    assert origins["routing.balance[0].kind"] == f"{path}:3"
    assert origins["routing.balance[0].coeff"] == "default"
    assert origins["memory[0].regions[0]"] == "command line"
    assert origins["train.steps"] == f"{path}:4"
    assert set(Counter(origin.split()[0] for origin in origins.values())) == {
        "preset",
        f"{path}:3",
        f"{path}:4",
        "command",
        "default",
    }


def test_a_run_that_fails_says_why(tmp_path: Path, cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RunError("the moon is full.", "Wait.")

    monkeypatch.setattr(trainer.checkpoint.Saver, "save", fails)
    with pytest.raises(RunError):
        train(small_spec(tmp_path, steps=1))
    last = events(tmp_path / "run")[-1]
    assert (last["event"], last["outcome"], last["reason"]) == ("end", "failed", "the moon is full. Wait.")


def begin(run: Path, *more: str) -> None:
    """Record the start of a run, and ``more`` events."""
    with EventLog(run) as log:
        for event in ("start", *more):
            log.write(event, 0, outcome="done")  # type: ignore[arg-type]


def outcomes(run: Path) -> list[tuple[str, str]]:
    return [(event["outcome"], event.get("reason", "")) for event in events(run) if event["event"] == "end"]


def test_the_process_that_holds_the_folder_adds_an_end_that_is_missing(tmp_path: Path) -> None:
    def ranks() -> None:
        begin(tmp_path)
        (tmp_path / METRICS).write_text('{"step": 7}\n')
        raise RunError("rank 1 was ended by SIGKILL.")

    with pytest.raises(RunError), RecordedEnd(tmp_path):
        ranks()
    assert outcomes(tmp_path) == [("failed", "rank 1 was ended by SIGKILL.")]
    assert events(tmp_path)[-1]["step"] == 7


def test_a_rank_that_has_said_why_leaves_its_exit_code(tmp_path: Path) -> None:
    with RecordedEnd(tmp_path) as end:
        begin(tmp_path)
        end.code = 1
    assert outcomes(tmp_path) == [("failed", "a rank has left with exit code 1, and said why.")]


def test_an_end_that_is_there_stays_alone(tmp_path: Path) -> None:
    with RecordedEnd(tmp_path):
        begin(tmp_path, "end")
    assert outcomes(tmp_path) == [("done", "")]


def test_a_run_that_was_killed_keeps_no_end_when_another_does_not_start(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(RunError), RecordedEnd(tmp_path):
        raise RunError("there is no text.")
    assert outcomes(tmp_path) == []


def test_a_folder_in_which_nothing_starts_stays_empty(tmp_path: Path) -> None:
    with RecordedEnd(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_of_origins_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / ORIGINS).write_text(json.dumps({"train.lr": "default"})[:-3])
    assert read_origins(tmp_path / ORIGINS) == {}
