"""A start by the job that began a run goes on with it; any other start, and one of a run that is done, does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moefw.commands import specs
from moefw.compose.assembly import Assembly
from moefw.training.job import job_names, job_to_go_on
from moefw.training.records.events import EVENTS, EventLog
from moefw.training.resolved_spec import write_resolved
from small_spec import small_spec

SLURM = {"SLURM_JOB_ID": "42"}
STANDALONE = {"TORCHELASTIC_RUN_ID": "8f7c", "SLURM_JOB_ID": "42"}


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, []),
        ({"TORCHELASTIC_RUN_ID": "none"}, []),
        ({"TORCHELASTIC_RUN_ID": "moe-7"}, ["torchrun moe-7"]),
        (SLURM, ["Slurm 42"]),
        (STANDALONE, ["torchrun 8f7c", "Slurm 42"]),
    ],
)
def test_a_job_is_known_by_torchruns_id_and_by_slurms(environment: dict[str, str], names: list[str]) -> None:
    assert job_names(environment) == names


@pytest.fixture
def assembly(tmp_path: Path) -> Assembly:
    return specs.read(str(small_spec(tmp_path)), [])


def begun(assembly: Assembly, *jobs: list[str], done: bool = False) -> None:
    """Leave a run in the folder that each of ``jobs`` in turn has started."""
    run_dir = Path(assembly.spec.run.dir)
    run_dir.mkdir()
    write_resolved(assembly, run_dir)
    with EventLog(run_dir) as log:
        for names in jobs:
            log.write("start", 0, jobs=names)
            log.write("checkpoint", 2)
        log.write("end", 2, outcome="done" if done else "failed")


def test_a_job_that_comes_back_goes_on(assembly: Assembly) -> None:
    begun(assembly, ["Slurm 41"], ["Slurm 42"])
    assert job_to_go_on(assembly, SLURM) == "Slurm 42"


def test_torchrun_on_one_node_has_another_id_when_its_slurm_job_comes_back(assembly: Assembly) -> None:
    begun(assembly, ["torchrun 1a2b", "Slurm 42"])
    assert job_to_go_on(assembly, STANDALONE) == "Slurm 42"


@pytest.mark.parametrize(
    "jobs",
    [[["Slurm 41"]], [["Slurm 42"], ["Slurm 43"]], [["torchrun 42"]], [[]]],
    ids=["other", "later", "kind", "none"],
)
def test_a_run_that_another_job_started_last_is_not_gone_on_with(assembly: Assembly, jobs: list[list[str]]) -> None:
    begun(assembly, *jobs)
    assert job_to_go_on(assembly, SLURM) == ""


def test_without_a_job_no_run_is_gone_on_with(assembly: Assembly) -> None:
    begun(assembly, [])
    assert job_to_go_on(assembly, {}) == ""


def test_a_job_that_trains_twice_begins_a_second_run(assembly: Assembly) -> None:
    """As a script does, or a user in an interactive job."""
    begun(assembly, ["Slurm 42"], done=True)
    assert job_to_go_on(assembly, SLURM) == ""


def test_a_job_with_another_spec_begins_another_run(assembly: Assembly, tmp_path: Path) -> None:
    begun(assembly, ["Slurm 42"])
    assert job_to_go_on(specs.read(str(tmp_path / "run.yaml"), ["train.lr=0.5"]), SLURM) == ""


def test_more_ranks_are_no_other_spec(assembly: Assembly, tmp_path: Path) -> None:
    begun(assembly, ["Slurm 42"])
    assert job_to_go_on(specs.read(str(tmp_path / "run.yaml"), [], 2), SLURM) == "Slurm 42"


@pytest.mark.parametrize("events", [b'{"event": \n{}\n', b"\xff\n{}\n", b""])
def test_a_folder_whose_events_cannot_be_read_is_not_gone_on_with(assembly: Assembly, events: bytes) -> None:
    begun(assembly, ["Slurm 42"])
    (Path(assembly.spec.run.dir) / EVENTS).write_bytes(events)
    assert job_to_go_on(assembly, SLURM) == ""


def test_runs_of_earlier_versions_name_no_job(assembly: Assembly) -> None:
    begun(assembly)
    (Path(assembly.spec.run.dir) / EVENTS).write_text(json.dumps({"event": "start", "step": 0}) + "\n")
    assert job_to_go_on(assembly, SLURM) == ""
