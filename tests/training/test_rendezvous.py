"""Local ranks meet at a place closed to other users, and no message to a rank is unpickled."""

from __future__ import annotations

import os
import pickle
import re
import signal
import stat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import copies
from moefw.commands import specs
from moefw.compose.build import Shared, build_model, open_layout
from moefw.runtime.naming import initialise
from moefw.testing.pool import RankPool
from moefw.training.session import Session
from moefw.training.trainer import Trainer
from run_cases import end, losses, ranks_of, wait_until

SPEC = """\
model: {dim: 16, num_layers: 1, num_experts: 4, top_k: 2, expert_dim: 16}
attention: {num_heads: 2, num_kv_heads: 2, head_dim: 8}
data: {use: text, path: %s}
train: {steps: 3, tokens_per_step: 128, micro_batch: 1, seq_len: 64, eval_every: 2, eval_tokens: 128}
run: {dir: %s, device: cpu}
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meeting")
    (folder / "text.txt").write_text("a fox jumps over a dog\n" * 400)
    (folder / "spec.yaml").write_text(SPEC % (folder / "text.txt", folder / "run"))
    return folder / "spec.yaml"


def listening(pid: int) -> set[str]:
    """Return the addresses that a process listens on, as the kernel writes them."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
        inodes |= {found[1]} if found else set()
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}


@pytest.mark.fault(
    "another user of the machine looks for a way in", "ranks listen on loopback alone and meet in a folder of mode 0700"
)
def test_local_ranks_listen_on_loopback_and_meet_in_a_folder_of_their_own(spec: Path, tmp_path: Path) -> None:
    places, run = tmp_path / "places", tmp_path / "run"
    places.mkdir()
    environment = os.environ | {"TMPDIR": str(places), "MOEFW_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    options = ["parallel.experts.ep=2", "train.steps=100000", f"run.dir={run}"]
    process = copies.Copy(["moefw", "train", spec, *options], env=environment)
    wait_until(lambda: losses(run), process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    assert [listening(pid) for pid in ranks] == [{"0100007F"}] * 2
    (folder,) = places.glob("moefw-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    process.send_signal(signal.SIGTERM)
    end(process)
    assert not folder.exists()


SPLIT = "{dense: {dp: 2, tp: 2, shard: all}, experts: {ep: 2, shard: all}}"


def train_save_and_resume(spec: str, run_dir: str, cache: Path) -> list[float]:
    """Train, evaluate, save and resume on this rank, where any unpickling is an error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    assembly = specs.read(spec, [f"parallel={SPLIT}", f"run.dir={run_dir}"], dist.get_world_size())
    data = assembly.parts.data.prepare(cache)
    with (
        mock.patch.object(dist.distributed_c10d, "_tensor_to_object", refuse),
        mock.patch.object(pickle, "loads", refuse),
    ):
        layout, shared, device = open_layout(assembly, "cpu"), Shared(), torch.device("cpu")
        model = build_model(assembly, layout, device, shared)
        initialise(model, seed=0, std=model.init_std)
        session = Session(assembly=assembly, device=device, layout=layout, data=data, model=model, shared=shared)
        first = Trainer(session, resume=None)
        losses = [first._step(step)[0]["loss"] for step in range(2)]
        first.checkpoints.save_now(1)
        again = Trainer(session, resume="last")
        assert again.start.step == 2
        losses.append(again._step(2)[0]["loss"])
        shared.close()
    return losses


@pytest.mark.fault(
    "a peer sends pickled objects at any time of a run",
    "nothing is unpickled while ranks train, evaluate, save and resume",
)
def test_nothing_is_unpickled_in_a_run(pool: RankPool, spec: Path, tmp_path: Path) -> None:
    specs.read(str(spec), []).parts.data.prepare(tmp_path)
    found = pool.run(train_save_and_resume, 4, str(spec), str(tmp_path / "run"), tmp_path)
    assert found == [found[0]] * 4
