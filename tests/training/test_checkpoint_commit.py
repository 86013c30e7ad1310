"""A checkpoint is complete or absent, whenever a run is killed, and never contains non-finite numbers."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from checkpoint_cases import INDEX, SHARD, save, tiny
from fake_steps import fake_assembly
from moefw.compose.optimizer import build_optimizer
from moefw.core.errors import RunError
from moefw.runtime.naming import by_parameter, state_tensors
from moefw.runtime.parallel.local_shards import local, whole
from moefw.runtime.parallel.opened_layout import OpenedLayout
from moefw.testing.pool import RankPool
from moefw.testing.suites.optimizer_memory_policy_case import give_gradients
from moefw.testing.suites.runs import open_model, whole_model
from moefw.testing.training import SMALL
from moefw.training import checkpoint
from moefw.training.checkpoint import saving
from moefw.training.checkpoint.commit import prune
from moefw.training.checkpoint.reading import opened
from moefw.training.folder import checkpoint_dirs
from pairwise import quick


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


class KilledError(BaseException):
    """Simulates a kill: a BaseException that no handler catches."""


@contextmanager
def watched(last: int = -1) -> Iterator[list[str]]:
    """Log flushes, renames and deletions, and raise KilledError before call number ``last``."""
    log: list[str] = []

    def logged(name: str, function: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if len(log) == last:
                raise KilledError
            at = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            log.append(" ".join([name, *(Path(each).name for each in (at, *args))]))
            return function(path, *args, **kwargs)

        return call

    with (
        mock.patch.object(os, "fsync", logged("sync", os.fsync)),
        mock.patch.object(Path, "rename", logged("rename", Path.rename)),
        mock.patch.object(shutil, "rmtree", logged("delete", shutil.rmtree)),
    ):
        yield log


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    with watched() as log:
        save(tmp_path / "run", 4)
    assert log == [
        f"sync {SHARD}",
        f"sync {INDEX}",
        "sync manifest.json",
        "sync step-4.tmp",
        "rename step-4.tmp step-4",
        "sync checkpoints",
        "sync run",
    ]


def test_a_checkpoint_that_is_dropped_loses_its_name_first(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with watched() as log:
        save(tmp_path, 4, keep=1)
    gone = ".step-2.discarded"
    assert log[-3:] == [f"delete {gone}", f"rename step-2 {gone}", f"delete {gone}"]
    assert names(tmp_path) == {"step-4"}


def moment_count(tmp_path: Path) -> int:
    save(tmp_path, 2, 4, value=1.0)
    with watched() as log:
        save(tmp_path, 4, keep=1, value=2.0)
    return len(log)


def test_the_newest_checkpoints_and_those_of_each_so_many_steps_stay(tmp_path: Path) -> None:
    save(tmp_path, 2, 3, 4, 5, 6, 7)
    prune(tmp_path, keep=2, keep_every=3)
    assert names(tmp_path) == {"step-3", "step-6", "step-7"}
    prune(tmp_path, keep=1)
    assert names(tmp_path) == {"step-7"}


@pytest.mark.fault("a save over another one is cut off at any moment", "one of the two is whole")
def test_at_every_moment_of_a_save_over_another_one_a_checkpoint_of_the_step_is_whole(tmp_path: Path) -> None:
    number = moment_count(tmp_path / "whole")
    assert number >= 10
    for moment in range(number):
        run = tmp_path / str(moment)
        save(run, 2, 4)
        with pytest.raises(KilledError), watched(moment):
            save(run, 4, keep=1, value=2.0)
        chosen = checkpoint.choose(run, "last")
        assert chosen is not None
        assert chosen.step == 4
        opened(chosen.folder).verify()
        checkpoint.load(chosen.folder, *tiny())
        save(run, 6)
        assert {"step-4", "step-6"} <= names(run) <= {"step-2", "step-4", "step-6"}
        for _, folder in checkpoint_dirs(run):
            opened(folder).verify()


def test_what_killed_runs_have_left_goes_at_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 2)
    for left in ("step-3.tmp", "step-4.tmp", ".step-1.discarded", "step-2.replaced"):
        shutil.copytree(tmp_path / "checkpoints" / "step-2", tmp_path / "checkpoints" / left)
    (tmp_path / "checkpoints" / "step-9.aside").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    save(tmp_path, 4)
    assert names(tmp_path) == {"step-2", "step-4", "step-9.aside", "notes"}


def test_what_lies_after_a_step_is_set_aside_under_a_name_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        save(tmp_path, 2, 4)
        (said,) = checkpoint.set_aside_after(tmp_path, 2)
    assert names(tmp_path) == {"step-2", "step-4.aside", "step-4.aside.1"}
    assert said == f"the checkpoint of step 4 is set aside: {tmp_path}/checkpoints/step-4.aside.1"
    chosen = checkpoint.choose(tmp_path, "last")
    assert chosen is not None
    assert chosen.step == 2


def test_what_no_manifest_can_name_is_not_saved(tmp_path: Path) -> None:
    """Such a checkpoint could not be loaded."""
    layout = OpenedLayout(fake_assembly(dict(SMALL), 1).layout, "cpu")
    model, optimizer = tiny(1.0)
    optimizer.state[model.norm]["two\nlines"] = torch.zeros(3)
    with pytest.raises(RunError, match=r"step-2 could not be saved: .* is not the name of a tensor"):
        checkpoint.save(tmp_path, 2, model, optimizer, layout, checkpoint.Origin(), keep=1)
    assert not names(tmp_path)


LAYOUTS: dict[str, dict[str, Any]] = {
    "copies and experts": {"experts": {"ep": 2}},
    "all sharded": {"dense": {"shard": "all"}, "experts": {"shard": "all"}},
    "split": {"dense": {"tp": 2}, "experts": {"etp": 2}},
}


def poison(run_dir: Path, parallel: dict[str, Any]) -> list[tuple[set[str], str]]:
    """Return the names of non-finite tensors and the message of a save, for each tensor of rank 1, poisoned in turn.

    The model has a dense layer and an MoE layer.
    """
    parts = {"gemm": {"use": "grouped"}, "parallel": parallel}
    sizes = {"vocab_size": 64, "num_layers": 2}
    model, assembly, layout, shared = open_model(whole_model(2, parts=parts, plugins=(), sizes=sizes))
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    give_gradients(model, 0)
    optimizer.step()
    found = []

    def attempt(held: Tensor, bad: Any) -> None:
        kept, value = local(held).clone(), torch.nan if len(found) % 2 else -torch.inf
        if layout.rank == 1 and kept.numel():
            local(held).view(-1)[-1] = value
        wanted = bad() if kept.numel() else {""}
        try:
            checkpoint.save(run_dir, 2, model, optimizer, layout, checkpoint.Origin(), keep=9)
        except RunError as error:
            found.append((wanted, str(error)))
        local(held).copy_(kept)

    with torch.no_grad():
        checkpoint.save(run_dir, 1, model, optimizer, layout, checkpoint.Origin(), keep=9)
        for parameter, pieces in by_parameter(model):
            states = optimizer.state[parameter]
            for word, held in {
                "parameter {}": parameter.detach(),
                "optimizer state exp_avg_sq of {}": states["exp_avg_sq"],
            }.items():

                def bad(held: Any = held, pieces: Any = pieces, word: str = word) -> set[str]:
                    values = whole(held)
                    return {word.format(piece.name) for piece in pieces if not piece.of(values).isfinite().all()}

                attempt(held, bad)
        for name, held in state_tensors(model).items():
            attempt(held, lambda name=name: {f"state {name}"})
    shared.close()
    return found


@pytest.mark.fault(
    "a weight, a state or a moment is NaN at a save ({id})", "no rank saves; the tensor and its rank are named"
)
@pytest.mark.parametrize("layout", quick(LAYOUTS, "copies and experts", "all sharded"))
def test_what_is_not_finite_on_one_rank_is_saved_by_none_and_named(pool: RankPool, tmp_path: Path, layout: str) -> None:
    first, second = pool.run(poison, 2, tmp_path, LAYOUTS[layout])
    assert len(second) > 30
    assert [said for _, said in first] == [said for _, said in second]
    for wanted, said in second:
        head = "step 2 is not saved: "
        assert said.startswith(head)
        assert "is not finite on rank 1. The checkpoint of step 1 is whole: train on with --resume=last-good" in said
        assert said.removeprefix(head).split(" is not finite")[0] in wanted
    assert any(".experts.7." in said for _, said in second)
    assert names(tmp_path) == {"step-1"}


def fill_the_disk(run_dir: Path) -> str:
    """Save on two ranks of which the second has a full disk."""
    parts = {"parallel": LAYOUTS["split"]}
    model, assembly, layout, shared = open_model(whole_model(2, parts=parts, plugins=(), sizes={"vocab_size": 64}))
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    fault = mock.patch.object(saving, "write", full if layout.rank == 1 else saving.write)
    said = ""
    if layout.rank == 0:
        save(run_dir, 1)
    with fault:
        try:
            checkpoint.save(run_dir, 2, model, optimizer, layout, checkpoint.Origin(), keep=9)
        except RunError as error:
            said = str(error)
    shared.close()
    return said


@pytest.mark.fault("one rank cannot write its shard", "no rank's checkpoint; earlier ones are untouched")
def test_a_checkpoint_that_one_rank_cannot_write_is_no_ranks(pool: RankPool, tmp_path: Path) -> None:
    (said,) = set(pool.run(fill_the_disk, 2, tmp_path))
    assert "step-2.tmp cannot be written: no space left on device (on rank 1)" in said
    assert "Make room and continue from step 1 with --resume." in said
    assert names(tmp_path) == {"step-1"}
