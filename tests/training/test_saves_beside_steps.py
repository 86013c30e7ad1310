"""A checkpoint that is written while training goes on is the one that training would have waited for, or none."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import killed_in_saves
from command_here import moefw_says
from fake_cuda import FakeCuda
from kill_chain import SHIM, compiled
from moefw.compose.optimizer import build_optimizer
from moefw.core.errors import MoefwError
from moefw.runtime.communication.agreement import everywhere
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.training import SMALL
from moefw.training import checkpoint
from moefw.training.checkpoint import files
from moefw.training.checkpoint.parts import Part
from moefw.training.checkpoint.snapshot import Snapshot
from moefw.training.engine import Engine, Votes
from moefw.training.folder import MANIFEST, checkpoint_dirs
from pairwise import deep, quick
from run_cases import MANY, end, environment_in, start
from small_spec import small_spec

SHARDED = {"dense": {"shard": "all"}, "experts": {"shard": "all"}}
RECIPE = {"use": "fp8-tensor", "backend": "emulate", "scaling": "delayed", "history": 3}
PRIMARY = {
    "parallel": SHARDED,
    "attention": {**SMALL["attention"], "num_kv_heads": 4, "head_dim": 128},
    "precision": {"use": "fp8-blockwise", "backend": "emulate", "primary_weights": "fp8"},
}
SMALLEST = {"vocab_size": 64}
BLOCKS = {
    "vocab_size": 64,
    "dim": 256,
    "expert_dim": 256,
    "shared_expert_dim": 0,
    "num_layers": 1,
    "num_dense_layers": 0,
    "num_experts": 4,
}
CASES: Mapping[str, tuple[dict[str, Any], dict[str, int]]] = {
    "FSDP": ({"parallel": SHARDED}, SMALLEST),
    "pp": ({"parallel": {"pp": 2}}, SMALLEST),
    "ep, delayed scaling": ({"parallel": {"experts": {"ep": 2}}, "precision": RECIPE}, SMALLEST),
    "tp, etp": ({"parallel": {"dense": {"tp": 2}, "experts": {"etp": 2}}}, SMALLEST),
    "primary weights": (PRIMARY, BLOCKS),
    "states in bf16": ({"parallel": SHARDED, "memory": [{"use": "optimizer-bf16"}]}, SMALLEST),
    "states on the host": (
        {"parallel": SHARDED, "memory": [{"use": "optimizer-offload", "bucket_bytes": 2048}]},
        SMALLEST,
    ),
    "updates on the host": (
        {"memory": [{"use": "optimizer-offload", "update": "host", "bucket_bytes": 2048}]},
        SMALLEST,
    ),
}
STEPS = 5
SAVED_AT = (1, 3)
"""The steps after which a checkpoint is saved: the second one reuses the memory of the first."""


@contextmanager
def no_clock(*_: object) -> Iterator[None]:
    yield


@contextmanager
def late_copies(seconds: float) -> Iterator[None]:
    """Let the thread begin to copy only after ``seconds``, in which training runs until its update."""
    taken = Snapshot.taken

    def late(self: Snapshot, *arguments: Any) -> Any:
        time.sleep(seconds)
        return taken(self, *arguments)

    with mock.patch.object(Snapshot, "taken", late):
        yield


def manifests(parts: dict[str, Any], folder: Path, beside: bool, sizes: Mapping[str, int]) -> list[bytes]:
    """Train, and save beside steps or while training waits; return the manifests, which seal every bit."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, assembly, layout, shared = open_model(whole_model(world, parts=parts, plugins=(), sizes=sizes))
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    saver = checkpoint.Saver(folder, model, optimizer, layout, keep=9)
    engine = Engine.of(model, optimizer, layout, assembly.spec.train, beside=saver)
    with late_copies(0.2):
        for step in range(1, STEPS + 1):
            engine.step(global_batch(assembly, layout, step), 1e-3, no_clock)
            if step in SAVED_AT:
                save = saver.begin if beside else saver.save
                save(step, checkpoint.Origin())
            elif saver.goes_on:
                saver.settled()
    shared.close()
    return [(folder / "checkpoints" / f"step-{step}" / MANIFEST).read_bytes() for step in SAVED_AT]


@pytest.mark.parametrize("case", quick(CASES, "FSDP", "pp", "primary weights", "updates on the host"))
def test_a_save_beside_steps_has_every_bit_of_one_that_training_waits_for(
    pool: RankPool, tmp_path: Path, case: str
) -> None:
    """The copy begins late, so that the next update would change what is saved if it did not wait."""
    parts, sizes = CASES[case]
    at_once, beside = (
        pool.run(manifests, 2, parts, tmp_path / name, name == "beside", sizes) for name in ("at once", "beside")
    )
    assert beside == at_once
    assert at_once[0][0] != at_once[0][1]


def bad_saves(folder: Path) -> list[str]:
    """Save steps 1 to 4 beside steps; the second rank cannot write the second, and has NaN in the third.

    Return what is told of each, and which checkpoints are there after it.
    """
    model, assembly, layout, shared = open_model(whole_model(2, parts={}, plugins=(), sizes=SMALLEST))
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    saver = checkpoint.Saver(folder, model, optimizer, layout, keep=1)
    engine = Engine.of(model, optimizer, layout, assembly.spec.train, beside=saver)
    fails_here = layout.rank == 1
    full = mock.patch.object(files.os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    told = []
    for step in range(1, 5):
        engine.step(global_batch(assembly, layout, step), 1e-3, no_clock)
        kept = model.norm.weight.detach().clone()
        with torch.no_grad():
            model.norm.weight[0] = torch.nan if step == 3 else kept[0]
        with full if step == 2 and fails_here else nullcontext():
            saver.begin(step, checkpoint.Origin())
            saver.wait_until_read()
            with torch.no_grad():
                model.norm.weight.copy_(kept)
            votes = Votes()
            while not votes.decided(layout.plan.world):
                votes = engine.rehearse(global_batch(assembly, layout, step), no_clock).votes
        told.append(f"{votes.done} done, {votes.failed} failed")
        try:
            saver.settled()
        except MoefwError as error:
            told[-1] = f"{votes.failed > 0} {error}"
        there = everywhere([step for step, _ in checkpoint_dirs(folder)], layout.host_group())[0]
        told[-1] += f" {there}"
    shared.close()
    return told


def test_a_snapshot_is_taken_behind_the_update_on_a_stream_of_its_own_in_memory_made_once() -> None:
    cuda = FakeCuda()
    snapshot = Snapshot(torch.device("cpu"), cuda)
    values = torch.arange(6.0).view(2, 3)
    part = Part(name="model/norm", values=values.T, corner=(0, 0), whole=(3, 2))
    first = snapshot.taken([part], snapshot.now())[0].values
    # A thread begins on the first GPU. Leaving the stream there would open a context on it, of every rank.
    assert cuda.log == [
        ("record", "compute", 0),
        ("of", torch.device("cpu")),
        ("wait", "out", 0),
        ("copy", "out"),
        ("record", "out", 4),
        ("host waits", 4),
    ]
    assert first.equal(values.T)
    assert first.is_contiguous()
    values += 1.0
    again = snapshot.taken([part], snapshot.now())[0].values
    assert again.data_ptr() == first.data_ptr()
    assert again.equal(values.T)


@pytest.mark.fault("a rank cannot write, or would save NaN, beside steps", "no rank commits it; all ranks are told")
def test_what_fails_on_one_rank_is_told_to_all_in_a_later_step_and_never_committed(
    pool: RankPool, tmp_path: Path
) -> None:
    (first, second, third, fourth), other = pool.run(bad_saves, 2, tmp_path)
    assert [first, second, third, fourth] == other
    assert first == "2 done, 0 failed [1]"
    scratch = tmp_path / "checkpoints" / "step-2.tmp"
    full = f"{scratch} cannot be written: no space left on device (on rank 1)."
    assert second.startswith(f"True step-2 could not be saved: {full} Earlier checkpoints are untouched.")
    assert third.startswith("True step 3 is not saved: parameter norm.weight is not finite on rank ")
    assert second.endswith("[1]")
    assert third.endswith("[1]")
    assert fourth == "2 done, 0 failed [4]"
    # A hidden folder is one that is being deleted beside the steps.
    assert [path.name for path in (tmp_path / "checkpoints").glob("[!.]*")] == ["step-4"]


def test_a_run_that_saves_beside_steps_leaves_and_records_what_one_that_waits_does(
    write_spec: Callable[..., Path],
) -> None:
    spec = write_spec(steps=7, checkpoint_every=2, keep_checkpoints=2, keep_every=4)
    found = {}
    for mode in ("async", "sync"):
        run = spec.parent / mode
        moefw_says("train", spec, f"train.checkpoint={mode}", f"run.dir={run}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        saved = [event for event in events if event["event"] == "checkpoint"]
        manifests = {path.parent.name: path.read_bytes() for path in run.glob(f"checkpoints/*/{MANIFEST}")}
        found[mode] = ([line["loss"] for line in lines], [event["path"] for event in saved], manifests)
        assert all(event["bytes"] > 0 and event["seconds"] > 0 for event in saved)
        assert [event["step"] for event in saved] == [2, 4, 6, 7]
        blocked = [line["checkpoint_blocked_s"] for line in lines if "checkpoint_blocked_s" in line]
        assert 0 < sum(blocked) <= sum(event["seconds"] for event in saved) + 1e-5
        told = [line["checkpoint_bytes"] for line in lines if line.get("checkpoint_bytes")]
        assert len(told) >= 2
        # What is committed after the last line is in the events alone.
        assert told == [event["bytes"] for event in saved][: len(told)]
    losses, paths, manifests = found["async"]
    assert (losses, paths) == found["sync"][:2]
    assert manifests.keys() == found["sync"][2].keys() == {"step-4", "step-6", "step-7"}
    # The plugins and everything else of the two runs are the same, and so is each bit of their checkpoints.
    assert manifests == found["sync"][2]
    assert paths == [f"checkpoints/step-{step}" for step in (2, 4, 6, 7)]


@pytest.mark.fault("a disk hangs while a checkpoint is written beside steps", "named by the step of the checkpoint")
def test_a_disk_that_hangs_is_named(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    environment = environment_in(tmp_path)
    path, run = small_spec(tmp_path, steps=MANY, checkpoint_every=2), tmp_path / "run"
    told = {"BELOW": run / "checkpoints", "FROM": "rank-00000.safetensors", "LOG": tmp_path / "log", "AT": 2, "HANG": 1}
    shim = compiled(SHIM, tmp_path)
    hang = {"LD_PRELOAD": str(shim), "RANK": "0", **{f"FAULT_{name}": str(value) for name, value in told.items()}}
    code, said, _ = end(start({**environment, **hang}, "-m", "moefw", "train", path, "run.timeout_s=4"))
    assert code == 1
    (line,) = said
    assert "step 4, writing the checkpoint of step 2 to the disk" in line


@pytest.mark.fault(
    "a run is killed at {id} counted system calls of saves beside steps", "no torn checkpoint; the same end"
)
@pytest.mark.parametrize("kills", deep(7, 20))
def test_a_run_killed_inside_saves_leaves_whole_checkpoints_and_ends_with_the_same_bits(
    tmp_path: Path, kills: int
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    spec = small_spec(tmp_path, checkpoint_every=killed_in_saves.EVERY, tokens_per_step=128, seq_len=16)
    environment = {**environment_in(tmp_path), "LD_PRELOAD": str(compiled(SHIM, tmp_path))}
    done = subprocess.run(
        [sys.executable, killed_in_saves.__file__, spec, str(kills)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["points"]) >= 20
    assert found["killed"] == kills, done.stderr
    assert found["torn"] == []
    assert found["ended"] == 0
    assert found["same losses"]
    assert found["same end"]
