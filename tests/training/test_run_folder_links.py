"""A run's folder may be a link; its target is never moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint_cases import SHARD, save
from moefw.core.errors import SpecError
from moefw.training import checkpoint
from moefw.training.folder import checkpoint_dirs, run_folder


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
