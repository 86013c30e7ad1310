"""A full disk is reported in one line, for any file, and may be ignored."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import on_a_full_disk
from small_spec import small_spec

CASES: dict[str, tuple[int, list[str]]] = {
    "spec.yaml": (0, []),
    "origins.json": (1, []),
    "tensorboard": (3, []),
    "events.jsonl": (4, []),
    "metrics.jsonl": (5, []),
    "expert_load.jsonl": (6, []),
    "everything": (0, ["train.on_full_disk=continue"]),
    "checkpoint": (30, ["train.checkpoint_every=5", "train.steps=6"]),
    "a checkpoint passed over": (30, ["train.checkpoint_every=5", "train.steps=6", "train.on_full_disk=continue"]),
}
"""Free pages when a run begins, and overrides. Files take one page each, in this order, and origins.json two.

Records of six steps need no second page, for which there is none while a checkpoint fills the disk beside the steps.
"""

pytestmark = pytest.mark.skipif(
    subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode != 0,
    reason="this machine gives no mount namespace",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("full")
    spec = small_spec(folder, steps=20, tokens_per_step=128)
    script = [
        sys.executable,
        on_a_full_disk.__file__,
        spec,
        folder / "disk",
        json.dumps([*CASES.values()]),
    ]
    done = subprocess.run(["unshare", "-Urm", *map(str, script)], check=True, capture_output=True, text=True)
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.fault("the disk is full at {id}", "one line names the file; exit code 1")
@pytest.mark.parametrize("name", list(CASES)[:6])
def test_a_run_that_stops_names_the_file(told: dict[str, Any], name: str) -> None:
    found = told[name]
    assert found["code"] == 1
    (line,) = found["err"].splitlines()
    assert name in line
    assert "cannot be written: no space left on device. Make room" in line


@pytest.mark.fault("the disk is full; on_full_disk: continue", "each file is named once, and the run ends well")
def test_a_run_that_goes_on_names_each_file_once_and_ends_well(told: dict[str, Any]) -> None:
    found = told["everything"]
    said = [line for line in found["out"].splitlines() if "Training goes on" in line]
    assert all(name in line for line, name in zip(said, list(CASES)[:6], strict=True))
    assert "step 20/20" in found["out"]
    assert found["code"] == 1
    assert "step-20 could not be saved" in found["err"]


def test_a_checkpoint_that_finds_no_room_stops_the_run_or_is_passed_over(told: dict[str, Any]) -> None:
    stopped, passed = told["checkpoint"], told["a checkpoint passed over"]
    assert stopped["code"] == passed["code"] == 1
    assert "step-5 could not be saved" in stopped["err"]
    assert "There is no earlier checkpoint. Make room and train again." in stopped["err"]
    assert passed["out"].count("could not be saved") == 1
    assert "step-6 could not be saved" in passed["err"]
    assert not any("checkpoints/" in name for case in (stopped, passed) for name in case["files"])


def test_a_checkpoint_that_is_passed_over_is_recorded(told: dict[str, Any]) -> None:
    events = [json.loads(line) for line in told["a checkpoint passed over"]["events"].splitlines()]
    (full,) = (event for event in events if event["event"] == "full_disk")
    assert full["step"] >= 5  # steps go on beside the save
    assert full["path"] == "checkpoints"
    assert "step-5 could not be saved" in full["reason"]
    assert (events[-1]["event"], events[-1]["outcome"]) == ("end", "failed")
    assert "step-6 could not be saved" in events[-1]["reason"]


def test_what_was_written_before_is_whole(told: dict[str, Any]) -> None:
    assert "spec.yaml" in told["metrics.jsonl"]["files"]
    assert told["metrics.jsonl"]["metrics"] == ""
