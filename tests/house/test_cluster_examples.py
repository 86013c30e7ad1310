"""The files to start from on a cluster are whole commands, and the Slurm script trains, saves, requeues and goes on."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from torch.distributed.run import get_args_parser

import copies
import held_steps
from moefw.commands.doctor.probes import OWN_STORES
from moefw.commands.train import train
from moefw.training.records.events import EVENTS, STARTS, read_events
from training_process import last_step, step_losses

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
SLURM = FOLDER / "slurm.sbatch"
STEPS = 10
ALLOCATOR, GROWS = "PYTORCH_ALLOC_CONF", "expandable_segments:True"


def fake(folder: Path, name: str, script: str) -> None:
    """A command that scripts find before any other of its name."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def checked(torchrun: list[str]) -> Any:
    """Options of torchrun, whose command is one of ``moefw train``, which both parse."""
    options = get_args_parser().parse_args(torchrun)
    assert (options.module, options.training_script) == (True, "moefw")
    command, *arguments = options.training_script_args
    assert command == "train"
    assert train.make_context(command, arguments).params["resume"] == "auto"
    return options


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_a_script_is_sound_bash(script: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / script], check=True)


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_a_script_lets_the_allocator_grow_its_segments_as_plans_assume(script: str) -> None:
    assert f"\nexport {ALLOCATOR}={GROWS}\n" in (FOLDER / script).read_text()


def test_torchrun_is_called_with_what_the_machines_share(tmp_path: Path) -> None:
    fake(tmp_path, "torchrun", f'echo "${OWN_STORES}"; printf "%s\\n" "$@"')
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODES": "1:2"}
    command = [FOLDER / "torchrun.sh", "node1", "first-run", "a spec.yaml", "train.steps=5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    own_stores, *torchrun = done.stdout.splitlines()
    options = checked(torchrun)
    assert own_stores == "1"
    assert (options.nnodes, options.nproc_per_node, options.rdzv_id) == ("1:2", "8", "first-run")
    assert options.rdzv_endpoint == "node1:29400"
    assert options.training_script_args == ["train", "a spec.yaml", "train.steps=5", "--resume=auto"]


def test_the_jobset_is_one_torchrun_over_its_pods() -> None:
    jobset = YAML(typ="safe").load(FOLDER / "kubernetes.yaml")
    (node,) = jobset["spec"]["replicatedJobs"]
    job = node["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    torchrun, *arguments = container["command"]
    options = checked(arguments)
    name = jobset["metadata"]["name"]
    assert torchrun == "torchrun"
    assert job["parallelism"] == job["completions"] == int(options.nnodes)
    assert options.rdzv_endpoint == f"{name}-{node['name']}-0-0.{name}:29400"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options.nproc_per_node)
    assert container["env"] == [{"name": OWN_STORES, "value": "1"}, {"name": ALLOCATOR, "value": GROWS}]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_guide_names_each_file() -> None:
    guide = (FOLDER.parents[1] / "docs" / "guides" / "train-on-a-cluster.md").read_text()
    assert set(re.findall(r"\(\.\./\.\./examples/cluster/(.+?)\)", guide)) == {path.name for path in FOLDER.iterdir()}


SRUN = """
# Starts a task a rank on one node, as srun does: passes on USR1, and returns the highest exit code.
trap 'kill -USR1 "${tasks[@]}"' USR1
tasks=()
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
  tasks+=($!)
done
highest=0
for task in "${tasks[@]}"; do
  while true; do
    code=0
    wait "$task" || code=$?
    kill -0 "$task" 2>/dev/null || break  # else the wait has ended for a signal
  done
  highest=$((code > highest ? code : highest))
done
exit "$highest"
"""


RANK = """
# Stands for a rank: notes its command, and leaves with a code when it is told that the time is over.
trap 'exit {code}' USR1
echo "$@" > {folder}/rank-$SLURM_PROCID.part
mv {folder}/rank-$SLURM_PROCID.part {folder}/rank-$SLURM_PROCID
while true; do sleep 0.02; done
"""


BARE_MOEFW = "import bare_runs; bare_runs.make_runs_bare(); from moefw.__main__ import main; main()"


class Slurm:
    """One job of two tasks on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self._spec = held_steps.spec(folder, steps=STEPS, checkpoint_every=3)
        bin_ = folder / "bin"
        bin_.mkdir()
        fake(bin_, "srun", SRUN)
        fake(bin_, "scontrol", f'echo "$@" >> {shlex.quote(str(folder / "scontrol"))}')
        fake(bin_, "moefw", f'exec {shlex.quote(sys.executable)} -c {shlex.quote(BARE_MOEFW)} "$@"')
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.environment = held_steps.environment(folder)
        self._of_a_job = self.environment | {
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "42",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_NODEID": "0",
            "SLURM_JOB_NODELIST": "localhost",
            "MASTER_PORT": str(port),
        }

    def start(self) -> subprocess.Popen[str]:
        command = ["bash", SLURM, self._spec, "parallel.experts.ep=2"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=self._of_a_job, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]

    def requeued(self) -> list[str]:
        path = self.folder / "scontrol"
        return path.read_text().splitlines() if path.exists() else []

    def signal_step(self, job: subprocess.Popen[str]) -> None:
        """Send the signal of ``#SBATCH --signal`` to the job's step, and not to its script."""
        (signalled,) = re.findall(r"^#SBATCH --signal=(\w+)@\d+$", SLURM.read_text(), flags=re.MULTILINE)
        (srun,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(srun), signal.Signals[f"SIG{signalled}"])


def wait_until(true: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 200
    while not true():
        assert time.monotonic() < deadline_s, "the run did not get that far"
        assert job.poll() is None, job.communicate(10)
        time.sleep(0.01)


@pytest.mark.parametrize(("code", "requeued"), [(75, ["requeue 42"]), (1, []), (0, [])])
def test_a_slurm_job_is_requeued_where_its_ranks_have_saved_and_are_not_done(
    tmp_path: Path, code: int, requeued: list[str]
) -> None:
    slurm = Slurm(tmp_path)
    fake(tmp_path / "bin", "moefw", RANK.format(code=code, folder=shlex.quote(str(tmp_path))))
    job = slurm.start()
    ranks = [tmp_path / f"rank-{rank}" for rank in range(2)]
    wait_until(lambda: all(rank.exists() for rank in ranks), job)
    slurm.signal_step(job)
    said, _ = job.communicate(timeout=60)
    assert (job.returncode, slurm.requeued()) == (code, requeued), said
    for rank in ranks:
        command, *arguments = rank.read_text().split()
        assert command == "train"
        assert arguments[:2] == [str(tmp_path / "run.yaml"), "parallel.experts.ep=2"]
        assert train.make_context(command, arguments).params["resume"] == "auto"


@pytest.mark.deep
@pytest.mark.fault("the time of a Slurm job is over", "saved, requeued, and gone on with; losses of an unbroken run")
def test_a_slurm_job_whose_time_is_over_is_requeued_and_ends_with_the_losses_of_an_unbroken_one(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    unbroken = tmp_path / "unbroken"
    options = ["parallel.experts.ep=2", f"run.dir={unbroken}"]
    done = copies.run("moefw", "train", tmp_path / "run.yaml", *options, env=slurm.environment)
    assert done.returncode == 0, done.stderr

    held_steps.hold(slurm.folder, 4)
    job = slurm.start()
    wait_until(lambda: last_step(slurm.run_dir / "metrics.jsonl") == 4, job)
    slurm.signal_step(job)
    held_steps.go_on(slurm.folder, 4)
    said, _ = job.communicate(timeout=200)
    assert (job.returncode, slurm.requeued()) == (75, ["requeue 42"]), said

    again = slurm.start()
    said, _ = again.communicate(timeout=200)
    assert (again.returncode, slurm.requeued()) == (0, ["requeue 42"]), said
    starts = [event for event in read_events(slurm.run_dir / EVENTS) if event["event"] in STARTS]
    assert [event["jobs"] for event in starts] == [["Slurm 42"], ["Slurm 42"]]
    # The signal may come before step 4 has ended, or in the next one.
    assert [event["step"] for event in starts] in ([0, 4], [0, 5])
    assert step_losses(slurm.run_dir) == step_losses(unbroken)
