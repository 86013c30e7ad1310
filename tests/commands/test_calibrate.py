"""``moefw bench calibrate`` writes a file of this machine's cluster, which plans and runs read."""

from __future__ import annotations

import inspect
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from command_line import Said, say
from moefw.commands import calibrate
from moefw.planner import cluster
from moefw.planner.calibration import alone
from moefw.planner.calibration.alone import Heads, Shape, Sizes
from moefw.planner.calibration.links import Group
from moefw.planner.calibration.ranks import Readings
from moefw.planner.calibration.readings import Reading
from moefw.planner.cluster import THIS_MACHINE
from moefw.training import checked_steps, host_costs
from moefw.training.run_facts import computing_name
from moefw.training.world import Place
from small_spec import small_spec

COPIED = "copy in memory"
READING = Reading(value=2.0, spread=0.01, repeats=20)
HEADS = Heads(sequences=1, heads=1, keys=4, width=8)
SMALL = Sizes(
    shapes=(Shape(rows=8, columns=4, depth=16),),
    shapes_of_dgrads=(Shape(rows=8, columns=4, depth=16),),
    heads=(HEADS,),
    spread=0,
    copied=4096,
    operands=(1024,),
    operators=10,
)


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let little be measured on a CPU, and the user's own clusters be in an empty folder."""
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(alone, "ON_A_CPU", SMALL)
    monkeypatch.setattr(host_costs, "GEMMS", ("loop",))
    monkeypatch.setattr(checked_steps, "ALONE", {"alone": {}})


def calibrated(*arguments: object) -> Said:
    return say("bench", "calibrate", "--device", "cpu", "--repeats", 4, *arguments)


def test_it_writes_a_cluster_that_commands_know_by_name(tmp_path: Path) -> None:
    said = calibrated()
    path = tmp_path / "cache" / "clusters" / "this-machine.yaml"
    assert (said.code, said.out) == (0, f"wrote {path}: moefw plan SPEC --cluster this-machine\n")
    lines = said.err.splitlines()[:22]
    assert lines[2].startswith("[3/22] products of fp32, 8 x 4 x 16: ")
    assert sum("an operator in a layer" in line for line in lines) == 3
    assert all(line.startswith(f"[{number}/22] ") and "A/A spread" in line for number, line in enumerate(lines, 1))
    measured = cluster.read(THIS_MACHINE)
    assert measured.gpu.names == (computing_name(torch.device("cpu")),)
    assert [*cluster.with_gpu(measured.gpu.names[0])] == [(THIS_MACHINE, measured)]
    assert measured.links == cluster.Links()
    assert measured.gpu.board_power_w is None
    assert measured.gpu.threads is not None
    assert measured.gpu.threads.value == torch.get_num_threads()
    assert "4 repeats, A/A spread" in measured.gpu.memory_tb_per_s.source
    (checked,) = measured.checked
    assert checked.layout == "alone"
    assert "4 repeats, A/A spread" in checked.measured_ms.source
    planned = say("plan", small_spec(tmp_path), "--cluster", THIS_MACHINE)
    far = next(line for line in planned.out.splitlines() if line.startswith("extrapolated, as none of these steps"))
    wider = 1 + 0.25 * len(far.partition(": ")[2].split(", "))
    assert f"give or take {100 * abs(checked.error) * wider:.0f} %" in planned.out
    assert "that is from the errors of 1 small steps which were measured there" in planned.out
    assert "a GPU of this-machine has" in planned.out
    assert f"MFU is of {measured.peak_tflops('float32'):g} TFLOPS, its peak of products of float32" in planned.out


def test_it_writes_the_file_that_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert calibrated("--output", path).out == f"wrote {path}: moefw plan SPEC --cluster {path}\n"
    assert cluster.read(str(path)).about.startswith(computing_name(torch.device("cpu")))
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object) -> None:
        raise NotImplementedError("no multiplication here")

    monkeypatch.setattr(alone.Operators, "plain_s", lacks)
    said = calibrated("--output", tmp_path / "mine.yaml")
    assert said.code == 0
    reason = "rank 0: no multiplication here"
    assert f"[15/22] an operator: failed: {reason}\n" in said.err
    assert f"left out: an operator could not be measured: {reason}\n" in said.err
    assert cluster.read(str(tmp_path / "mine.yaml")).host_launch_us is None
    monkeypatch.setattr(alone, "_copy", lacks)
    said = calibrated("--output", tmp_path / "other.yaml")
    assert said.code == 1
    assert "error: copy in memory could not be measured: rank 0: no multiplication here." in said.err
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize(("share", "told"), [(0.95, False), (0.5, True)])
def test_a_machine_that_did_other_work_is_told(share: float, told: bool) -> None:
    long = {"products of fp32, 2 x 2 x 2": share, "products of fp32, 1 x 1 x 1": 0.3, COPIED: 1.0}
    assert calibrate._shared(Readings(of={}, failed={}, share=long)) == (share if told else None)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "mine.json", f"a cluster is a .yaml file. Use {tmp_path / 'mine.yaml'}."),
        (tmp_path / "none" / "mine.yaml", f"there is no folder {tmp_path / 'none'}."),
    ):
        said = calibrated("--output", path)
        assert (said.code, said.out) == (2, "")
        assert says in said.err
        assert "[1/22]" not in said.err


def test_ranks_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefw.compose.machine._num_visible_gpus", lambda: 2)
    said = say("bench", "calibrate", "--ranks", 3)
    assert said.code == 2
    assert "--ranks 3: this machine has 2 GPUs" in said.err
    assert "Use --ranks 2 or fewer, or --device cpu." in said.err
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(variable, value)
    assert "--ranks 3: torchrun or Slurm has started 2. Leave --ranks out." in str(refused(3))


def refused(ranks: int) -> BaseException:
    """Error of the command for a number of ranks. A rank would end this process."""
    with pytest.raises(calibrate.PlanError) as error:
        calibrate._options(calibrate.place_from_environment(), ranks, None, "cpu", 4)
    return error.value


UUID = "0b6b5f1e-7a31-4c55-9d0c-5ad1d0a5c9ce"


@pytest.mark.parametrize(("answer", "watts"), [("echo 700.00", 700.0), ("echo '[N/A]'", None), ("exit 9", None)])
def test_the_driver_is_asked_for_the_power_of_this_gpu(
    answer: str,
    watts: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{answer}\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=UUID))
    assert calibrate._board_power_w(torch.device("cuda", 1)) == watts
    asked = f"--id=GPU-{UUID} --query-gpu=power.limit --format=csv,noheader,nounits\n"
    assert (tmp_path / "asked").read_text() == asked
    assert ("nvidia-smi does not tell it" in capsys.readouterr().err) is (watts is None)


def test_the_cluster_of_gpus_has_what_torch_and_the_driver_say_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def says(name: str, answer: object) -> None:
        signature = inspect.signature(getattr(torch.cuda, name))

        def function(*args: object, **kwargs: object) -> object:
            asked.append(signature.bind(*args, **kwargs).arguments["device"])
            return answer

        monkeypatch.setattr(torch.cuda, name, function)

    says("get_device_name", "NVIDIA H100 80GB HBM3")
    says("mem_get_info", (1 << 30, 80 << 30))
    says("get_device_capability", (10, 3))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(calibrate, "_board_power_w", lambda _: 700.0)
    shape = "8192 x 8192 x 8192"
    of = dict.fromkeys((COPIED, f"products of bf16, {shape}", f"products of fp8, {shape}"), READING)
    readings = Readings(of=of, failed={}, share={})
    groups = [Group(link="node", ranks=[0, 1]), Group(link="network", ranks=[0, 2])]
    gpu = torch.device("cuda", 1)
    made = calibrate._cluster(readings, gpu, Place(1, 4, 1, 2), groups, None, "ours").gpu
    assert set(asked) == {gpu}
    assert made.names == ("NVIDIA H100 80GB HBM3",)
    assert made.memory_gib.value == 80.0
    assert made.capability == "10.3"
    assert made.board_power_w is not None
    assert made.board_power_w.value == 700.0
    assert [(product.format, product.rows) for product in made.products] == [("bf16", 8192), ("fp8", 8192)]
    assert made.peak_tflops.fp8 is not None
