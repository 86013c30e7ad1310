"""The folder of a run belongs to one run at a time, and earlier contents are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moefw.core.errors import SpecError
from moefw.training.folder import checkpoint_dirs, run_folder


def opened(run_dir: Path, said: list[str], *, resume: bool = False) -> Any:
    assembly: Any = SimpleNamespace(spec=SimpleNamespace(run=SimpleNamespace(dir=str(run_dir))))
    return run_folder(assembly, resume=resume, tell=said.append)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-4").mkdir(parents=True)
    (folder / "checkpoints" / "step-4" / "manifest.json").touch()
    (folder / "spec.yaml").touch()
    return folder


def test_an_earlier_run_is_moved_aside(run: Path) -> None:
    said: list[str] = []
    with opened(run, said):
        (run / "metrics.jsonl").touch()
    assert (run.with_name("run.1") / "spec.yaml").is_file()
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]
    assert said == [f"{run} held an earlier run: it is now {run}.1"]


def test_an_earlier_run_is_moved_back_where_the_new_one_leaves_nothing(run: Path) -> None:
    said: list[str] = []
    with pytest.raises(ValueError, match="too little text"), opened(run, said):
        raise ValueError("too little text")
    assert (run / "spec.yaml").is_file()
    assert not run.with_name("run.1").exists()
    assert said[1:] == [f"{run}.1 is {run} again"]


def test_a_run_that_fails_before_it_begins_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too little text"), opened(tmp_path / "new", []):
        raise ValueError("too little text")
    assert not (tmp_path / "new").exists()


def test_what_is_no_run_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SpecError, match="holds something else than a run"), opened(tmp_path, []):
        pass
    assert (tmp_path / "thesis.tex").is_file()


@pytest.mark.fault(
    "a second run is started in the folder of another (resumed: {id})", "refused; the folder is as it was"
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_under_way_is_left_alone(run: Path, resume: bool) -> None:
    with (
        opened(run, [], resume=True),
        pytest.raises(SpecError, match="that of a run under way"),
        opened(run, [], resume=resume),
    ):
        pass
    assert (run / "spec.yaml").is_file()


def test_a_run_that_has_not_written_yet_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "run", []):
        with pytest.raises(SpecError, match="that of a run under way"), opened(tmp_path / "run", []):
            pass
        assert (tmp_path / "run").is_dir()


@pytest.mark.fault("the process that held a run's folder is killed", "the folder is free")
def test_the_folder_of_a_run_that_was_killed_is_free(run: Path) -> None:
    code = f"import fcntl, os; fcntl.flock(os.open({str(run)!r}, os.O_RDONLY), fcntl.LOCK_EX); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with opened(run, [], resume=True):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpecError, match="cannot be written: permission denied"), opened(tmp_path / "run", []):
        pass


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(SpecError, match="cannot be written: not a directory"), opened(tmp_path / "run", []):
        pass


def test_only_folders_named_for_a_step_are_checkpoints(run: Path) -> None:
    for name in ("step-²", "step-", "step-2.tmp"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "manifest.json").touch()
    assert [step for step, _ in checkpoint_dirs(run)] == [4]
