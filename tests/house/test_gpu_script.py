"""All code that awaits a GPU runs here first, as it would there: without an installed moefw, network or git."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sysconfig
import venv
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import pytest
from click.testing import CliRunner

from moefw.commands.check import check

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
NO_NETWORK = """
import sys

def refuse(event, given):
    if event == "socket.getaddrinfo" and given[0] not in (None, "", "localhost", "127.0.0.1"):
        raise OSError(f"there is no network to ask for {given[0]}")

sys.addaudithook(refuse)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("on_gpu")


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python with our dependencies, in which moefw is neither installed nor declared."""
    venv.create(tmp_path / "bare", symlinks=True)
    [site] = (tmp_path / "bare").glob("lib/*/site-packages")
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if "moefw" not in installed.name and installed.suffix != ".pth":
            (site / installed.name).symlink_to(installed)
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    return tmp_path / "bare" / "bin" / "python"


@pytest.mark.deep
def test_all_parts_run_on_a_bare_machine_and_are_appended(
    bare_python: Path, tmp_path: Path, script: ModuleType
) -> None:
    out, before = tmp_path / "out" / "gpu.json", RESULTS.read_text() if RESULTS.exists() else None
    out.parent.mkdir()
    out.write_text('[{"date": "earlier"}]')
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    done = subprocess.run(
        [bare_python, "tests/support/parts_as_copies.py", "--dry", "--out", out.parent],
        cwd=ROOT,
        env={
            "PATH": "",
            "HOME": str(Path.home()),
            "MOEFW_CACHE": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        },
        capture_output=True,
        text=True,
    )
    earlier, run = json.loads(out.read_text())
    assert earlier == {"date": "earlier"}
    said = {name: part["said"] for name, part in run["parts"].items() if part["failed"]}
    assert not said, "\n".join(said.values())
    assert done.returncode == 0, done.stderr
    assert list(run["parts"]) == list(script.PARTS)
    assert run["dry"]
    assert run["commit"]
    assert {"8a forward, share of the matmul's rate", "kernel launches, forward"} <= {
        goal["what"] for goal in script.goals(run["parts"])
    }
    assert (RESULTS.read_text() if RESULTS.exists() else None) == before


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    code = f"import subprocess; print('begun'); subprocess.run(['sh', '-c', 'sleep 600 > {held}'])"
    watch, writers = script.watch, list[BinaryIO]()

    def watch_begun(process: subprocess.Popen[bytes], until: float) -> Any:
        writers.append(held.open("rb"))  # waits until ``sh`` has opened it
        return watch(process, until)

    monkeypatch.setattr(script, "LIMIT_S", 0)
    monkeypatch.setattr(script, "watch", watch_begun)
    part = script.perform(script.Part([], ["-c", code]), tmp_path, dry=True)
    assert part["timed_out"]
    assert part["failed"]
    assert part["said"] == "begun\n"
    assert script.outcome(part) == "ended after 0 s"
    with writers[0] as of_sleep:
        assert not of_sleep.read()  # ends when ``sleep`` has


@pytest.mark.parametrize("name", ["quickstart", "quickstart-fp8", "quickstart-offload"])
def test_what_trains_on_a_gpu_has_a_sound_spec(name: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, _, *spec_and_overrides = script.PARTS[name].full
    monkeypatch.chdir(ROOT)
    assert CliRunner().invoke(check, spec_and_overrides).exit_code == 0
