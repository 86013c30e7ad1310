"""``moefw inspect`` tells what the checkpoints of a run hold, and which are damaged."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import copies
from command_line import say
from small_spec import small_spec

TWO_HEADS = ("attention.num_heads=2", "attention.num_kv_heads=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks, which share experts and split attention, with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("trained")
    spec = small_spec(folder, ranks=2, checkpoint_every=1)
    done = copies.run("moefw", "train", spec, "parallel.dense.tp=2", *TWO_HEADS)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to damage."""
    return shutil.copytree(trained, tmp_path / "run")


def told(*arguments: object) -> Any:
    said = say("inspect", *arguments, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_steps_have_layouts_and_sizes(trained: Path) -> None:
    steps = told(trained)["steps"]
    assert [(step["step"], step["format"], step["damage"]) for step in steps] == [(1, 3, None), (2, 3, None)]
    assert [step["layout"] for step in steps] == [{"tp": 2, "ep": 2}] * 2
    folder = trained / "checkpoints" / "step-2"
    files = [*folder.glob("*.safetensors")]
    assert steps[1]["ranks"] == steps[1]["files"] == len(files) == 2
    assert steps[1]["bytes"] == sum(path.stat().st_size for path in files)


def test_the_last_checkpoint_has_versions_and_plugins(trained: Path) -> None:
    last = told(trained)["last"]
    assert last["step"] == 2
    assert last["versions"]["torch"] == torch.__version__
    assert ["routers", "topk"] in [[hook.removeprefix("moefw_"), name] for hook, name, _, _ in last["plugins"]]
    assert last["sequences"] == 2 * 8
    assert told(trained, "--step", 1)["last"]["sequences"] == 8


def test_the_parts_of_a_tensor_make_up_its_whole_shape(trained: Path) -> None:
    last = told(trained)["last"]
    tensors = {tensor["name"]: tensor for tensor in last["tensors"]}
    query = tensors["model/layers.0.attention.q_proj.weight"]
    assert query["shape"] == [32, 16]
    assert [(part["file"], part["corner"], part["shape"]) for part in query["parts"]] == [
        ("rank-00000.safetensors", [0, 0], [16, 16]),
        ("rank-00001.safetensors", [16, 0], [16, 16]),
    ]
    for tensor in tensors.values():
        assert sum(prod(part["shape"]) for part in tensor["parts"]) == prod(tensor["shape"])
    held = {kind["kind"]: kind for kind in last["kinds"]}
    assert held.keys() == {"model", "optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/step"}
    of_model = [tensor for name, tensor in tensors.items() if name.startswith("model/")]
    assert held["model"]["tensors"] == len(of_model)
    assert held["model"]["parts"] == sum(len(tensor["parts"]) for tensor in of_model)
    assert held["model"]["nbytes"] == 4 * held["model"]["elements"]
    assert held["optimizer/step"]["parts"] < held["optimizer/step"]["tensors"]


def test_on_a_terminal_or_not_it_is_tables(trained: Path) -> None:
    said = say("inspect", trained, "--tensors", "model/*.q_proj.weight")
    lines = [line.split() for line in said.out.splitlines()]
    assert said.code == 0
    assert lines[0] == ["step", "ranks", "layout", "files", "size", "damage"]
    assert lines[2][:5] == ["2", "2", "tp=2", "ep=2", "2"]
    part_of_first = ["rank-00000.safetensors", "[0:16,", "0:16],"]
    part_of_second = ["rank-00001.safetensors", "[16:32,", "0:16]"]
    query = ["model/layers.0.attention.q_proj.weight", "F32", "32", "x", "16", *part_of_first, *part_of_second]
    assert lines[-1] == query
    assert "tensor" not in say("inspect", trained).out.splitlines()[-1]


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_only_verify_reads_every_byte_and_names_file_and_tensor_of_a_flipped_bit(run: Path) -> None:
    flip_last_bit(run / "checkpoints" / "step-1" / "rank-00001.safetensors")
    assert say("inspect", run).code == 0
    said = say("inspect", run, "--verify")
    first, second = said.out.splitlines()[1:3]
    assert said.code == 1
    assert "step-1/rank-00001.safetensors is damaged: " in first
    assert "damaged" not in second


def test_a_checkpoint_that_cannot_be_read_is_one_line_beside_the_others(run: Path) -> None:
    flip_last_bit(run / "checkpoints" / "step-2" / "rank-00000.index.json")
    said = say("inspect", run)
    assert said.code == 1
    assert said.out.splitlines()[2].split()[0] == "2"
    assert said.out.splitlines()[2].endswith("step-2/rank-00000.index.json is damaged.")
    assert "\nstep 1\n" in said.out


def test_without_events_the_layout_is_unknown(run: Path) -> None:
    (run / "events.jsonl").unlink()
    found = told(run)
    assert [step["layout"] for step in found["steps"]] == [None, None]
    assert found["last"]["versions"] is None
    assert found["last"]["plugins"]


def test_a_folder_without_checkpoints_is_told(tmp_path: Path) -> None:
    said = say("inspect", tmp_path)
    assert (said.code, said.out) == (2, "")
    assert f"{tmp_path} holds no checkpoint." in said.err
