"""Small runs as processes that a test starts, watches, signals and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import faulty_source
from copies import Copy
from small_spec import small_spec

MANY = 100_000
"""More steps than a run completes."""


def environment_in(folder: Path) -> dict[str, str]:
    """Return the environment of runs that may use the faulty source, and prepare their text in the folder."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(faulty_source.install(folder / "site"))]))
    return {**os.environ, "MOEFW_CACHE": str(folder / "cache"), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def spec(folder: Path, *, ranks: int, steps: int = MANY, source: str = "text", name: str = "run") -> Path:
    return small_spec(folder, ranks=ranks, steps=steps, source=source, name=name)


def losses(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def start(environment: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, start_new_session=True, text=True, **pipes)  # type: ignore[call-overload]


def train(environment: dict[str, str], *arguments: object) -> Copy:
    """Start ``moefw train``; its launcher and its ranks are copies of a process that has imported torch."""
    return Copy(["moefw", "train", *arguments], env=environment)


def wait_until(true: Callable[[], object], process: subprocess.Popen[str] | Copy) -> None:
    deadline = time.monotonic() + 200
    while not true():
        assert time.monotonic() < deadline, "the run did not get that far"
        assert process.poll() is None, process.communicate(10)
        time.sleep(0.01)


def ranks_of(parent: int) -> list[int]:
    """Return the processes of the ranks that ``parent`` has started, in order."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def end(process: subprocess.Popen[str] | Copy) -> tuple[int, list[str], float]:
    """Wait for the end; return exit code, lines on stderr, and seconds. No process of the run may be left."""
    began = time.monotonic()
    _, errors = process.communicate(timeout=200)
    took_s = time.monotonic() - began
    _wait_until_gone(process.pid)
    return process.returncode, [line for line in errors.splitlines() if line], took_s


def _wait_until_gone(group: int) -> None:
    """Wait for the processes of a group, of which some end a moment after the run."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a process of the run is left")


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "moefw")
