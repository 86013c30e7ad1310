"""Ctrl-C before a command has begun, and a working folder that is gone: a message, and never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command_here import complaint, moefw_says

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
INTERRUPTED_AT = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupting())
runpy.run_module("moefw", run_name="__main__", alter_sys=True)
"""
"""Runs a command that gets Ctrl-C when it begins to import a module."""


def interrupted(
    module: str, *arguments: object, ignoring: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Return the end of a command that gets Ctrl-C when it begins to import a module."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignoring else None
    try:
        command = [sys.executable, "-P", "-c", INTERRUPTED_AT, module, *map(str, arguments)]
        return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    finally:
        if ignoring:
            signal.signal(signal.SIGINT, before)


@pytest.mark.fault("Ctrl-C while {id} is imported", "ends at once, exit code 130; one line")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        pytest.param("click", ["--help"], id="click"),
        pytest.param("moefw.core.errors", ["check", QUICKSTART], id="moefw.core.errors"),
        pytest.param("moefw.commands.check", ["check", QUICKSTART], id="moefw.commands.check"),
        pytest.param("torch", ["plan", QUICKSTART], id="torch"),
    ],
)
def test_ctrl_c_during_imports_is_told_in_a_line(tmp_path: Path, module: str, arguments: list[object]) -> None:
    done = interrupted(module, *arguments, MOEFW_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "interrupted.")


def test_ctrl_c_while_a_run_imports_torch_is_told_as_before_the_first_step(tmp_path: Path) -> None:
    alone = ["parallel={}", f"run.dir={tmp_path}/run"]
    done = interrupted("torch", "train", QUICKSTART, *alone, MOEFW_CACHE=str(tmp_path))
    assert done.returncode == 130
    assert done.stderr == "stopped by SIGINT before a step was done: there was nothing to save.\n"


def test_of_many_ranks_the_first_alone_says_that_it_is_interrupted() -> None:
    done = interrupted("click", "--help", RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_rank_whose_launcher_answers_ctrl_c_goes_on() -> None:
    done = interrupted("click", "--version", ignoring=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("moefw, version")


@pytest.fixture
def _gone_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


@pytest.mark.fault("the working folder is gone", "told, exit code 2")
@pytest.mark.usefixtures("_gone_folder")
@pytest.mark.parametrize("command", [["check", QUICKSTART], ["train", QUICKSTART], ["doctor"]], ids=str)
def test_a_working_folder_that_is_gone_is_told(command: list[object]) -> None:
    says = "error: the working folder cannot be used: no such file or directory. Change to a folder that exists."
    assert complaint(*command) == says


@pytest.mark.usefixtures("_gone_folder")
def test_help_needs_no_working_folder() -> None:
    assert "Commands:" in moefw_says("--help")
