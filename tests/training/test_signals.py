"""A signal saves a run at the end of its step and ends it with 75; resumed, it equals a run that was not stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from copies import Copy
from run_cases import TORCHRUN, end, environment_in, losses, ranks_of, spec, train, wait_until


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment_in(tmp_path_factory.mktemp("environment"))


def has_steps(run: Path, number: int) -> bool:
    return len(losses(run)) >= number


@pytest.mark.fault(
    "SIGTERM, Ctrl-C, SIGUSR1 to one rank", "saved after the step, exit code 75; the same end as unbroken"
)
def test_every_signal_saves_what_a_resumed_run_continues_to_the_same_end(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    path, run, steps = spec(tmp_path, ranks=2), tmp_path / "run", 0
    wishes: Sequence[Callable[[Copy], None]] = [
        lambda process: process.send_signal(signal.SIGTERM),
        lambda process: os.killpg(process.pid, signal.SIGINT),
        lambda process: os.kill(ranks_of(process.pid)[1], signal.SIGUSR1),
    ]
    for number, wish in enumerate(wishes):
        before = steps
        # A save beside steps goes on when the signal comes.
        process = train(environment, path, "train.checkpoint_every=1", *(["--resume"] if number else []))
        wait_until(partial(has_steps, run, steps + 2), process)
        wish(process)
        code, said, _ = end(process)
        steps = len(losses(run))
        assert code == 75, said
        assert said == [
            f"stopped by a signal after step {steps}, saved as {run}/checkpoints/step-{steps}. Continue with --resume."
        ]
        assert steps >= before + 2
    last = f"train.steps={steps + 2}"
    assert end(train(environment, path, "--resume", last))[0] == 0
    whole = spec(tmp_path, ranks=2, name="whole")
    assert end(train(environment, whole, last))[0] == 0
    assert losses(run) == losses(tmp_path / "whole")


@pytest.mark.fault("SIGTERM before the first step", "ends at once, exit code 143")
def test_a_request_before_anything_is_to_save_ends_the_run_at_once(tmp_path: Path, environment: dict[str, str]) -> None:
    path, mark = spec(tmp_path, ranks=1, source="faulty"), tmp_path / "mark"
    process = train(environment, path, "data.fault=block", "data.at=0", f"data.mark={mark}")
    wait_until(mark.exists, process)
    process.send_signal(signal.SIGTERM)
    code, said, seconds = end(process)
    assert code == 143
    assert said == ["stopped by SIGTERM before a step was done: there was nothing to save."]
    assert seconds < 30
    assert not (tmp_path / "run").exists()


@pytest.mark.fault("Ctrl-C twice", "ends at once, exit code 130")
def test_a_second_interrupt_ends_a_run_that_does_not_come_to_the_end_of_its_step(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    path, mark = spec(tmp_path, ranks=1, source="faulty"), tmp_path / "mark"
    process = train(environment, path, "data.fault=sleep", f"data.mark={mark}")
    wait_until(mark.exists, process)
    for _ in range(2):
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
    code, said, seconds = end(process)
    assert (code, said) == (130, ["interrupted."])
    assert seconds < 30


@pytest.mark.fault("SIGTERM to torchrun", "its ranks save")
def test_torchrun_passes_a_request_on_and_its_ranks_save(tmp_path: Path, environment: dict[str, str]) -> None:
    process = Copy([*TORCHRUN, "train", spec(tmp_path, ranks=2)], env=environment)
    wait_until(lambda: len(losses(tmp_path / "run")) > 1, process)
    process.send_signal(signal.SIGTERM)
    _, said, _ = end(process)
    (line,) = (line for line in said if line.startswith("stopped by"))
    step = len(losses(tmp_path / "run"))
    assert f"after step {step}, saved as" in line
    assert (tmp_path / "run" / "checkpoints" / f"step-{step}" / "manifest.json").is_file()
