"""The world that a process detects."""

from __future__ import annotations

import os
import pwd
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import copies
from moefw.core.errors import PlanError, RunError
from moefw.system.environment import ranks_of_this_machine
from moefw.system.folders import cache_dir
from moefw.training import rendezvous as rendezvous_module
from moefw.training.rendezvous import meet
from moefw.training.world import Place, place_from_environment, rendezvous, threads_of_a_rank
from small_spec import small_spec


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
    with pytest.raises(PlanError, match="RANK is 'one', which is no whole number of 0 or more"):
        place_from_environment({"RANK": "one", "WORLD_SIZE": "4"})
    with pytest.raises(PlanError, match="SLURM_NTASKS is 'abc', which is no whole number of 1 or more"):
        place_from_environment({"SLURM_NTASKS": "abc", "SLURM_PROCID": "0"})


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}


WRONG: list[tuple[dict[str, str], str, str, str]] = [
    (TORCHRUN, "LOCAL_WORLD_SIZE", "0", "which is no whole number of 1 or more."),
    ({}, "LOCAL_WORLD_SIZE", "x", "which is no whole number of 1 or more."),
    (TORCHRUN, "LOCAL_RANK", "-1", "which is no whole number of 0 or more."),
    (TORCHRUN, "WORLD_SIZE", "0", "which is no whole number of 1 or more."),
    (TORCHRUN, "WORLD_SIZE", "9" * 5000, "which is no whole number of 1 or more."),
    (SLURM, "SLURM_NODEID", "x", "which is no whole number of 0 or more."),
    (SLURM, "SLURM_LOCALID", "", "which is no whole number of 0 or more."),
    (SLURM, "SLURM_NTASKS_PER_NODE", "0", "which is no whole number of 1 or more."),
    (SLURM, "SLURM_TASKS_PER_NODE", "8(2x)", "which is no list of tasks by node, as 2(x3),1 is."),
    (SLURM, "SLURM_STEP_TASKS_PER_NODE", "0(x2)", "which is no list of tasks by node, as 2(x3),1 is."),
    (SLURM, "SLURM_JOB_ID", "abc", "which is no whole number of 0 or more. Set MASTER_PORT to a free port"),
    ({}, "OMP_NUM_THREADS", "0,2", "which is no number of threads."),
    ({}, "TMPDIR", "/not/there", "which cannot be written: no such file or directory."),
]


@pytest.mark.fault("{id} in the environment", "refused before anything starts, by name; exit 2")
@pytest.mark.parametrize(
    ("variables", "says"),
    [
        *(
            pytest.param(around | {name: value}, f"{name} is {value!r}, {reason}", id=f"{name}={value[:9]}")
            for around, name, value, reason in WRONG
        ),
        pytest.param(TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is empty.", id="MASTER_ADDR="),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(variables: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        place_from_environment(variables)
    (problem,) = caught.value.problems
    assert str(problem).startswith(says)


def test_all_variables_are_told_together() -> None:
    numbers = {"SLURM_PROCID": "w", "SLURM_NTASKS": "x", "SLURM_NODEID": "y", "SLURM_JOB_ID": "z"}
    variables = numbers | {"OMP_NUM_THREADS": "-1", "TMPDIR": "/no"}
    with pytest.raises(PlanError) as caught:
        place_from_environment(variables)
    assert [problem.what.split()[0] for problem in caught.value.problems] == [*variables]


def test_what_is_not_used_may_be_anything(tmp_path: Path) -> None:
    assert place_from_environment(SLURM | {"SLURM_JOB_ID": "abc", "MASTER_PORT": "29500"}) == Place(0, 2, 0, 1)
    assert place_from_environment({"MASTER_PORT": "http"}) is None
    assert place_from_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}) == Place(0, 1, 0, 1)
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http", "MOEFW_MEETING": str(tmp_path)}
    assert place_from_environment(launched) == Place(0, 2, 0, 2)


def test_a_process_alone_does_not_take_any_number_of_ranks_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    with pytest.raises(PlanError, match="LOCAL_WORLD_SIZE is '0'"):
        ranks_of_this_machine(1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ranks_of_this_machine(4) == 4


@pytest.mark.fault("no folder can hold temporary files", "told before anything starts; exit 2")
def test_a_system_without_a_folder_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/not/there")
    with pytest.raises(PlanError, match="The system's folder of temporary files cannot be written: no such file"):
        place_from_environment({})


def test_a_user_without_a_home_is_told_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "MOEFW_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(PlanError, match="HOME is not set and this user has no home folder"):
        cache_dir()


@pytest.mark.fault("a wrong variable in the environment of a run", "exit code 2; all of them are told")
def test_a_run_tells_what_is_wrong_in_its_environment(tmp_path: Path) -> None:
    wrong = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0", "OMP_NUM_THREADS": "all"}
    done = copies.run("moefw", "train", small_spec(tmp_path), env=os.environ | wrong)
    assert done.returncode == 2
    assert [line.split()[:2] for line in done.stderr.splitlines()] == [
        ["error:", "LOCAL_WORLD_SIZE"],
        ["error:", "OMP_NUM_THREADS"],
    ]


@pytest.mark.parametrize("told", ["http", "0", "65536", "-1", "29500.0", ""])
def test_what_is_no_port_is_refused(told: str) -> None:
    with pytest.raises(
        PlanError, match=f"MASTER_PORT is '{told}', which is no whole number from 1 to 65535. Use a free"
    ):
        place_from_environment({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": told})


@pytest.mark.parametrize(("told", "threads"), [("3", 3), ("4,2", 4), ("", 1)])
def test_a_rank_computes_with_the_threads_that_openmp_is_told_of(told: str, threads: int) -> None:
    assert threads_of_a_rank(10**6, {"OMP_NUM_THREADS": told}) == threads


@pytest.mark.parametrize("told", ["abc", "0", "-1"])
def test_what_is_no_number_of_threads_is_refused(told: str) -> None:
    with pytest.raises(PlanError, match="no number of threads"):
        threads_of_a_rank(1, {"OMP_NUM_THREADS": told})


def test_ranks_meet_at_the_first_node() -> None:
    assert rendezvous({"MASTER_ADDR": "host", "MASTER_PORT": "1234"}).url == "tcp://host:1234"
    assert rendezvous({"MASTER_ADDR": "::1", "MASTER_PORT": "1234"}).url == "tcp://[::1]:1234"
    assert rendezvous({"SLURM_JOB_NODELIST": "gpu[07-10,12]", "SLURM_JOB_ID": "2042"}).url == "tcp://gpu07:29542"
    assert rendezvous({"SLURM_JOB_NODELIST": "a1,a2"}).url == "tcp://a1:29500"


def meet_with(monkeypatch: pytest.MonkeyPatch, rank: int, *, seconds: float = 1.0, **environment: str) -> Any:
    """Let one of two ranks meet the other, which never comes."""
    monkeypatch.setattr(rendezvous_module, "_RESOLVES_WITHIN_S", 0.0)
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return meet(Place(rank, 2, rank, 2), timeout=timedelta(seconds=seconds))


@pytest.mark.fault("the host where ranks meet cannot be resolved", "told, with the variable that names it; exit 2")
@pytest.mark.parametrize(
    ("name", "value", "host"),
    [
        ("MASTER_ADDR", "head.invalid", "head.invalid"),
        ("MASTER_ADDR", "tcp://head", "tcp://head"),
        ("MASTER_ADDR", "head..invalid", "head..invalid"),
        ("SLURM_JOB_NODELIST", "gpu[07-09].invalid", "gpu07"),
    ],
)
def test_a_host_that_cannot_be_resolved_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, host: str
) -> None:
    says = f"the host '{host}' ({name}), where ranks meet, cannot be resolved: "
    with pytest.raises(PlanError, match=re.escape(says)):
        meet_with(monkeypatch, 1, **{name: value})


def test_a_host_whose_name_appears_a_little_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([OSError(-2, "Name or service not known"), None])

    def lookup(*_: object, **__: object) -> None:
        if answer := next(answers):
            raise answer

    monkeypatch.setattr(rendezvous_module, "_LOOK_S", 0.0)
    monkeypatch.setattr(rendezvous_module.socket, "getaddrinfo", lookup)
    rendezvous_module._resolve(rendezvous({"MASTER_ADDR": "head"}))
    assert next(answers, "both asked") == "both asked"


@pytest.fixture
def port() -> Iterator[int]:
    """A port in use."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.fault("the port where ranks meet is in use", "told, with what to set; exit 2")
def test_a_port_in_use_is_told(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    says = rf"port {port} \(MASTER_PORT\), where ranks meet, is in use on this machine. Set MASTER_PORT to a free port"
    with pytest.raises(PlanError, match=says):
        meet_with(monkeypatch, 0, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def test_a_port_in_use_that_follows_from_a_slurm_job_is_told(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr("moefw.training.world._FIRST_PORT", port - 42)
    says = rf"port {port} \({port - 42} \+ SLURM_JOB_ID modulo 1000\), where ranks meet, is in use"
    with pytest.raises(PlanError, match=says):
        meet_with(monkeypatch, 0, MASTER_ADDR="127.0.0.1", SLURM_JOB_ID="7042")


@pytest.mark.fault("a rank finds nobody where ranks meet", "told, with the address; exit 1")
def test_a_rank_that_meets_nobody_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        free = server.getsockname()[1]
    with pytest.raises(RunError, match=rf"rank 1 has not met the others at 127\.0\.0\.1:{free}: "):
        meet_with(monkeypatch, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free))


def test_jobs_that_share_a_port_do_not_read_each_others_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(hosted, 0, 2)]))
    first, second = (meet_with(monkeypatch, 0, SLURM_JOB_ID=job) for job in ("7042", "8042"))
    first.set("key", "of the first")
    assert not second.check(["key"])


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_of_agents_that_count_restarts_differently_meet_unless_one_store_serves_all_attempts(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """An agent counts the failures of its own ranks. Without a shared store, each attempt has a new one."""
    hosted = HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(hosted, 0, 2)]))
    environment = {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": str(shared)}
    first, second = (meet_with(monkeypatch, 0, **environment, TORCHELASTIC_RESTART_COUNT=count) for count in "01")
    first.set("key", "of the first")
    assert second.check(["key"]) != shared


@pytest.mark.parametrize(
    ("variables", "finalized"), [({}, True), ({"RANK": "1"}, False), ({"SLURM_PROCID": "1"}, False)]
)
def test_a_rank_leaves_without_finalizing_the_interpreter(variables: dict[str, str], finalized: bool) -> None:
    program = "import atexit; atexit.register(print, 'finalized'); from moefw.cli import main; main(['--version'])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("moefw, version")
    assert ("finalized" in done.stdout) == finalized
