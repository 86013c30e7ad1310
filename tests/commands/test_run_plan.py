"""The plan of memory is made beside a run, which it never delays or fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_here import moefw_says
from moefw.commands import run_plan, specs, train
from moefw.commands.run_plan import planned_beside
from moefw.compose.assembly import Assembly
from small_spec import small_spec


@pytest.fixture
def assembly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Assembly:
    """That of a run which has begun."""
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.yaml").touch()
    return specs.read(str(small_spec(tmp_path)), ())


def ledger(assembly: Assembly) -> dict[str, Any]:
    path = Path(assembly.spec.run.dir) / "ledger.json"
    return json.loads(path.read_text()) if path.is_file() else {}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return the processes that are started from now on."""
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **more: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*args, **more))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return processes


def test_a_plan_is_there_while_the_run_goes_on(assembly: Assembly, started: list[subprocess.Popen[bytes]]) -> None:
    with planned_beside(assembly):
        assert started[0].wait(timeout=200) == 0
    assert ledger(assembly).keys() == {"predicted"}
    assert ledger(assembly)["predicted"]["peak_bytes"] > 0


def test_train_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(train, "planned_beside", planned_beside)
    moefw_says("train", small_spec(tmp_path))
    assert (tmp_path / "run" / "ledger.json").is_file()


def test_a_run_that_ends_first_says_so_and_leaves_no_process(assembly: Assembly) -> None:
    with planned_beside(assembly):
        pass
    assert ledger(assembly) == {"no_plan": "the run ended before it was ready. See `moefw plan`."}


def test_a_plan_that_fails_says_why(
    assembly: Assembly, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = [sys.executable, "-c", "import sys; sys.exit('the moon is full.')"]
    monkeypatch.setattr(run_plan, "python", lambda *_: fails)
    with planned_beside(assembly):
        started[0].wait()
    assert ledger(assembly) == {"no_plan": "the moon is full."}


def test_a_run_that_does_not_begin_leaves_nothing(assembly: Assembly) -> None:
    run = Path(assembly.spec.run.dir)
    (run / "spec.yaml").unlink()
    with planned_beside(assembly):
        pass
    assert list(run.iterdir()) == []


def test_the_process_ends_with_its_input() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "moefw.commands.run_plan"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.communicate(b"[{}, 1]\n", timeout=200)
    assert process.returncode == 1
