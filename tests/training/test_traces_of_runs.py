"""``moefw train --trace``: what it writes, what it refuses, and what is left of a run that fails or is stopped."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from command_here import complaint, moefw_says
from run_cases import end, environment_in, losses, spec, train, wait_until


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment_in(tmp_path_factory.mktemp("environment"))


def steps_of(trace: Path, rank: int) -> list[int]:
    """Numbers of the steps in a rank's lines."""
    lines = (trace.with_suffix(".spans") / f"rank-{rank:05}.jsonl").read_text().splitlines()[1:]
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "step"]


def shares_of(trace: Path) -> dict[str, Any]:
    shares: dict[str, Any] = json.loads(trace.with_suffix(".shares.json").read_text())
    return shares


def test_a_run_traces_two_steps_behind_its_first_ones_on_every_rank(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    trace = tmp_path / "traces" / "run.json"
    process = train(environment, spec(tmp_path, ranks=2, steps=7), "--trace", trace)
    code, _, _ = end(process)
    assert code == 0
    assert steps_of(trace, 0) == steps_of(trace, 1) == [4, 5]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"dispatch, layer 0", "combine, layer 0"} <= {event["name"] for event in events}
    shares = shares_of(trace)
    assert shares["steps"] == [4, 5]
    assert set(shares["ranks"]) == {"0", "1"}
    assert Image.open(trace.with_suffix(".png")).format == "PNG"
    assert not trace.with_suffix(".operators").exists()


def test_a_trace_of_operators_has_the_same_names(tmp_path: Path, environment: dict[str, str]) -> None:
    trace = tmp_path / "run.json"
    options = ("--trace", trace, "--trace-steps", "2:2", "--trace-operators")
    assert end(train(environment, spec(tmp_path, ranks=2, steps=3), *options))[0] == 0
    for rank in range(2):
        assert steps_of(trace, rank) == [2]
        operators = json.loads((trace.with_suffix(".operators") / f"rank-{rank:05}.json").read_text())
        names = {event.get("name") for event in operators["traceEvents"]}
        assert {"step 2", "forward", "backward", "attend, layer 0", "optimizer", "aten::mm"} <= names


@pytest.mark.fault("a rank that fails in a traced run", "the trace holds the steps up to the failure")
def test_a_run_that_fails_leaves_the_trace_of_what_it_has_done(tmp_path: Path, environment: dict[str, str]) -> None:
    trace = tmp_path / "run.json"
    path = spec(tmp_path, ranks=2, source="faulty")
    # In the tenth step: a thread writes the trace, and a process that leaves like this loses what waits for it.
    fault = ("data.fault=leave with 3", "data.rank=1", "data.at=52")
    code, _, _ = end(train(environment, path, *fault, "--trace", trace, "--trace-steps", "1:1000"))
    assert code == 1
    done = steps_of(trace, 1)
    assert done == [*range(1, len(done) + 1)]
    assert len(done) >= 2
    assert shares_of(trace)["steps"][: len(done)] == done


def test_a_run_that_is_stopped_leaves_the_trace_of_what_it_has_done(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    trace, run = tmp_path / "run.json", tmp_path / "run"
    process = train(environment, spec(tmp_path, ranks=2), "--trace", trace, "--trace-steps", "1:100000")
    wait_until(partial(_has_steps, run, 3), process)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 75
    steps = shares_of(trace)["steps"]
    assert steps == [*range(1, len(losses(run)) + 1)]


def _has_steps(run: Path, number: int) -> bool:
    return len(losses(run)) >= number


def test_everything_that_is_wrong_about_a_trace_is_told_before_the_run(tmp_path: Path) -> None:
    path = spec(tmp_path, ranks=1, steps=5)
    said = moefw_says(
        "train", path, "--trace", tmp_path / "trace.png", "--trace-steps", "4:9", "--trace-memory", code=2
    ).splitlines()
    assert len(said) == 3
    assert f"--trace {tmp_path}/trace.png: the file of a trace ends in .json. Use {tmp_path}/trace.json." in said[0]
    assert "--trace-steps 4:9: train.steps is 5. Name steps of 1 to 5, or let train.steps be 9 or more." in said[1]
    assert "--trace-memory: run.device is cpu" in said[2]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("steps", "why"),
    [("4", "not of the form A:B"), ("0:1", "steps count from 1"), ("3:2", "ends before it begins"), ("a:b", "A:B")],
)
def test_a_bad_range_of_steps_is_refused(tmp_path: Path, steps: str, why: str) -> None:
    said = complaint("train", spec(tmp_path, ranks=1, steps=5), "--trace", tmp_path / "t.json", "--trace-steps", steps)
    assert f"--trace-steps {steps}: " in said
    assert why in said
    assert "Name the first and the last step to trace, such as 4:5, of 1 to 5." in said


@pytest.mark.parametrize("option", [("--trace-steps", "1:2"), ("--trace-operators",), ("--trace-memory",)])
def test_options_of_a_trace_need_its_file(tmp_path: Path, option: tuple[str, ...]) -> None:
    said = moefw_says("train", spec(tmp_path, ranks=1, steps=5), *option, code=2).splitlines()
    assert f"{option[0]}: nothing is traced. Add --trace FILE.json." in said[0]


def test_a_file_that_is_no_trace_is_never_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text("{}")
    said = complaint("train", spec(tmp_path, ranks=1, steps=5), "--trace", mine)
    assert "it exists and is no trace. Name another file." in said
    assert mine.read_text() == "{}"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = spec(tmp_path, ranks=1, steps=5)
    said = complaint("train", path, "--trace", path / "trace.json")
    assert f"{path} is no folder" in said
    said = complaint("train", path, "--trace", "/proc/trace.json")
    assert "--trace /proc/trace.json: " in said
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_refuses_steps_that_lie_behind_it(tmp_path: Path, environment: dict[str, str]) -> None:
    path = spec(tmp_path, ranks=2, steps=3)
    assert end(train(environment, path))[0] == 0
    trace = tmp_path / "trace.json"
    more = ("--resume", "train.steps=5", "--trace", trace)
    code, said, _ = end(train(environment, path, *more, "--trace-steps", "3:4"))
    assert code == 2
    assert "--trace-steps 3:4: this run goes from step 4 to step 5. Name steps of the run." in said[0]
    assert end(train(environment, path, *more))[0] == 0
    assert steps_of(trace, 0) == [4, 5]


def test_a_plan_draws_its_schedule(tmp_path: Path) -> None:
    path = spec(tmp_path, ranks=1)
    picture = tmp_path / "plan.png"
    stages = ("model.num_layers=4", "parallel={pp: 4}", "train.tokens_per_step=1024")
    assert moefw_says("plan", path, *stages, "--picture", picture) == f"the schedule is drawn in {picture}\n"
    assert Image.open(picture).format == "PNG"
    assert f"a picture ends in .png. Use {tmp_path}/plan.png." in complaint(
        "plan", path, "--picture", tmp_path / "plan.jpg"
    )
    assert "no such file or directory" in complaint("plan", path, "--picture", tmp_path / "none" / "plan.png")
