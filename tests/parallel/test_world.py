"""The world that a process detects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moefw.core.errors import PlanError
from moefw.training.world import Place, place_from_environment, rendezvous, threads_of_a_rank


def test_outside_of_torchrun_and_slurm_there_is_no_place() -> None:
    assert place_from_environment({}) is None
    assert place_from_environment({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchruns_variables_are_read() -> None:
    found = place_from_environment({"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert found == Place(5, 16, 1, 4)


def test_slurms_variables_are_read() -> None:
    environment = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "8"}
    assert place_from_environment(environment) == Place(9, 16, 1, 8)


@pytest.mark.parametrize(
    ("variables", "tasks"),
    [
        ({"SLURM_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "1"}, 2),
        ({}, 1),
    ],
)
def test_slurm_says_how_many_ranks_a_node_has_in_one_of_several_ways(variables: dict[str, str], tasks: int) -> None:
    found = place_from_environment({"SLURM_PROCID": "1", "SLURM_NTASKS": "20", **variables})
    assert found is not None
    assert found.local_world == tasks


def test_variables_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="rank 4 is not in a world of 4"):
        place_from_environment({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(PlanError, match="RANK=one"):
        place_from_environment({"RANK": "one", "WORLD_SIZE": "4"})
    with pytest.raises(PlanError, match="SLURM_NTASKS=abc"):
        place_from_environment({"SLURM_NTASKS": "abc", "SLURM_PROCID": "0"})


@pytest.mark.parametrize("told", ["http", "0", "65536", "-1", "29500.0", ""])
def test_what_is_no_port_is_refused(told: str) -> None:
    with pytest.raises(PlanError, match=f"MASTER_PORT is '{told}', which is no port. Use a number from 1 to 65535"):
        place_from_environment({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": told})


@pytest.mark.parametrize(("told", "threads"), [("3", 3), ("4,2", 4), ("", 1)])
def test_a_rank_computes_with_the_threads_that_openmp_is_told_of(told: str, threads: int) -> None:
    assert threads_of_a_rank(10**6, {"OMP_NUM_THREADS": told}) == threads


@pytest.mark.parametrize("told", ["abc", "0", "-1"])
def test_what_is_no_number_of_threads_is_refused(told: str) -> None:
    with pytest.raises(PlanError, match="no number of threads"):
        threads_of_a_rank(1, {"OMP_NUM_THREADS": told})


def test_ranks_meet_at_the_first_node() -> None:
    assert rendezvous({"MASTER_ADDR": "host", "MASTER_PORT": "1234"}) == "tcp://host:1234"
    assert rendezvous({"SLURM_JOB_NODELIST": "gpu[07-10,12]", "SLURM_JOB_ID": "2042"}) == "tcp://gpu07:29542"
    assert rendezvous({"SLURM_JOB_NODELIST": "a1,a2"}) == "tcp://a1:29500"


@pytest.mark.parametrize(
    ("variables", "finalized"), [({}, True), ({"RANK": "1"}, False), ({"SLURM_PROCID": "1"}, False)]
)
def test_a_rank_leaves_without_finalizing_the_interpreter(variables: dict[str, str], finalized: bool) -> None:
    program = "import atexit; atexit.register(print, 'finalized'); from moefw.cli import main; main(['--version'])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("moefw, version")
    assert ("finalized" in done.stdout) == finalized
