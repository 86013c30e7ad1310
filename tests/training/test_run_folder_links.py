"""A run's folder may be a link, whose target is never moved. Below it no link is followed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint_cases import SHARD, save
from command_here import complaint, moefw_says
from moefw.core.errors import SpecError
from moefw.training import checkpoint
from moefw.training.faults.stacks import keep_own
from moefw.training.folder import MOST_NAMED, checkpoint_dirs, run_folder
from moefw.training.records.metrics import MetricsLog


def opened(run_dir: Path, *, resume: bool = False) -> Any:
    assembly: Any = SimpleNamespace(spec=SimpleNamespace(run=SimpleNamespace(dir=str(run_dir))))
    return run_folder(assembly, resume=resume, tell=print)


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A link to the folder of a run with a checkpoint."""
    save(tmp_path / "disk", 4)
    path = tmp_path / "run"
    path.symlink_to(tmp_path / "disk")
    return path


@pytest.mark.fault("a run's folder is a link", "refused; the earlier run behind it stays")
def test_an_earlier_run_behind_a_link_is_not_moved(link: Path) -> None:
    with (
        pytest.raises(SpecError, match=r"is a link to .*disk, and an earlier run there is not moved aside"),
        opened(link),
    ):
        pass
    assert link.is_symlink()
    assert [step for step, _ in checkpoint_dirs(link)] == [4]
    assert not link.with_name("run.1").exists()


def test_a_run_behind_a_link_goes_on(link: Path) -> None:
    with opened(link, resume=True):
        chosen = checkpoint.choose(link, "last")
        with pytest.raises(SpecError, match="that of a run under way"), opened(link.resolve(), resume=True):
            pass
    assert chosen is not None
    assert chosen.step == 4


def test_a_new_run_is_written_through_a_link_to_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with opened(tmp_path / "run"):
        save(tmp_path / "run", 1)
    assert (tmp_path / "disk" / "checkpoints" / "step-1" / SHARD).is_file()
    assert (tmp_path / "run").is_symlink()


@pytest.mark.fault("a run's folder is a link to no folder ({id})", "refused; the link stays")
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("make", [lambda disk: None, Path.touch], ids=["dangling", "to a file"])
def test_a_link_to_no_folder_is_told_and_kept(tmp_path: Path, make: Callable[[Path], None], resume: bool) -> None:
    make(tmp_path / "disk")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with (
        pytest.raises(SpecError, match=r"run is a link to .*disk, which is no folder. Make that folder"),
        opened(tmp_path / "run", resume=resume),
    ):
        pass
    assert (tmp_path / "run").is_symlink()


def test_a_link_to_itself_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "run")
    with pytest.raises(SpecError, match="which is no folder"), opened(tmp_path / "run"):
        pass


LINKS = (
    *("spec.yaml.tmp", ".spec.yaml.tmp", ".metrics.jsonl.tmp", "sample.txt", "ledger.json", "tokenizer.json"),
    *("tensorboard", "routes", ".report.html.tmp", "stacks", "checkpoints/step-2.tmp", "checkpoints/.step-1.discarded"),
)
"""Names that a run writes to, renames or deletes."""


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the user, with names that a run's folder has, too."""
    folder = tmp_path / "victim"
    folder.mkdir()
    for name in ("step-9.safetensors", "thesis.tex"):
        (folder / name).write_text("mine")
    return folder


def untouched(victim: Path) -> bool:
    return {path.name: path.read_text() for path in victim.iterdir()} == dict.fromkeys(
        ("step-9.safetensors", "thesis.tex"), "mine"
    )


@pytest.mark.fault("a stranger's run folder holds links", "refused before anything is written; all links are named")
def test_a_run_goes_on_in_no_folder_that_holds_links(
    write_spec: Callable[..., Path], tmp_path: Path, victim: Path
) -> None:
    spec, run = write_spec(steps=1), tmp_path / "run"
    moefw_says("train", spec)
    for name in LINKS:
        path, is_folder = run / name, "." not in name or name.startswith("checkpoints")
        if path.is_dir():
            path.rename(tmp_path / f"{name}.moved")
        path.unlink(missing_ok=True)
        path.symlink_to(victim if is_folder else victim / "thesis.tex")
    said = complaint("train", spec, "train.steps=2", "train.record_routes=true", "--resume")
    assert untouched(victim)
    assert f"run.dir {run} may hold only regular files and folders" in said
    assert "'routes' is a link to " in said
    assert f", and {len(LINKS) - MOST_NAMED} more. Remove what is named" in said
    for name in LINKS:
        (run / name).unlink()
    moefw_says("train", spec, "train.steps=2", "train.record_routes=true", "--resume")
    assert (run / "routes" / "step-2.safetensors").is_file()


@pytest.mark.parametrize("name", LINKS)
def test_each_link_is_refused_by_name(name: str, tmp_path: Path, victim: Path) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "run" / name).symlink_to(victim)
    with pytest.raises(SpecError) as caught, opened(tmp_path / "run", resume=True):
        pass
    assert f"follows no link in it: {name!r} is a link to {str(victim)!r}. Remove" in str(caught.value)
    assert untouched(victim)


@pytest.mark.fault("a stranger's run folder holds a pipe", "refused by name; nothing waits for it")
def test_a_pipe_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(SpecError, match=r"'metrics\.jsonl' is no regular file"), opened(tmp_path / "run", resume=True):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_folder_that_nobody_enters_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "run" / "lost+found").mkdir(mode=0o000)
    with opened(tmp_path / "run", resume=True):
        pass


def test_folders_nested_deeper_than_calls_may_be_are_searched(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    deepest = tmp_path / "run"
    for _ in range(1500):
        deepest /= "a"
        deepest.mkdir()
    try:
        with opened(tmp_path / "run", resume=True):
            pass
    finally:
        os.removedirs(deepest)


def test_stacks_of_a_rank_that_hangs_earlier_are_not_kept_behind_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stacks").symlink_to(victim)
    assert keep_own(tmp_path / "run", 0) == "Their stacks could not be kept: the folder stacks of the run is a link."
    assert untouched(victim)


def test_metrics_are_not_appended_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with MetricsLog(tmp_path / "run", writing=lambda path: nullcontext()) as log:
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            log.write({"step": 1})
        (tmp_path / "run" / "metrics.jsonl").unlink()
    assert not (tmp_path / "elsewhere").exists()
