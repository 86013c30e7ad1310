"""A run of ``moefw train`` in separate processes, which a test can signal at a given step and inspect at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self, final

import torch
from attrs import frozen

from moefw.core.errors import ContractError
from moefw.system.python import python
from moefw.training.checkpoint.reading import opened
from moefw.training.folder import checkpoint_dirs
from moefw.training.records.metrics import read_metrics

TRAIN: Final = (*python("-m", "moefw"), "train")
ORPHANS_S: Final = 5.0
"""Seconds after the end of a run within which all of its ranks must exit."""
_LOOK_S: Final = 0.005


@frozen
class Ended:
    """End of a run: its exit code (negative: the number of a signal) and its output."""

    code: int
    out: str
    err: str


@final
class TrainingProcess:
    """A command that trains into ``run_dir``. As a context manager, it kills the command at exit.

    ``environment`` is added to ours. The process leads a session, so that all its processes can be killed together.
    """

    def __init__(self, command: Sequence[str], *, run_dir: Path, environment: Mapping[str, str] | None = None) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._earlier = _file_of(self._metrics)
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            stdout=self._out,
            stderr=self._err,
        )
        self._ranks: dict[int, int] = {}

    @property
    def pid(self) -> int:
        """Id of the started process: launcher, torchrun's agent, or a single rank."""
        return self._process.pid

    def wait_for_step(self, step: int, *, timeout_s: float = 240.0) -> None:
        """Wait until this start has recorded the step. Raises ContractError if it ends earlier or times out.

        A resumed run replaces the metrics file before its first step; the earlier file does not count.
        """
        self._wait(lambda: self._began() and last_step(self._metrics) >= step, f"step {step}", timeout_s)

    def restarted(self) -> None:
        """Ignore the metrics recorded so far, in order to wait for steps of the next start of the run."""
        self._earlier = _file_of(self._metrics)

    def wait_for_ranks(self, number: int, *, timeout_s: float = 240.0) -> dict[int, int]:
        """Wait for all ranks; return their process ids. Raises ContractError if the run ends earlier or times out."""
        self._wait(lambda: len(self.ranks()) >= number, f"{number} ranks", timeout_s)
        return self._ranks

    def ranks(self) -> dict[int, int]:
        """Process id of each running rank, and remember it."""
        running = {}
        for pid in _children(self.pid):
            rank = _rank_of(pid)
            if rank is not None:
                running[rank] = pid
        self._ranks |= running
        return running

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.ranks()[rank], number)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the launcher and its ranks."""
        self.ranks()
        os.killpg(self.pid, number)

    def ended(self, *, timeout_s: float = 240.0) -> Ended:
        """Wait for the end of the run and return it. Raises ContractError if it does not end in time."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self._failed(f"does not end in {timeout_s:g} s") from error
        return Ended(code, _all_of(self._out), _all_of(self._err))

    def said(self) -> str:
        """Its standard output so far."""
        return os.pread(self._out.fileno(), os.fstat(self._out.fileno()).st_size, 0).decode(errors="replace")

    def orphans(self) -> list[int]:
        """Ranks whose processes still run after ``ORPHANS_S``."""
        deadline_s = time.monotonic() + ORPHANS_S
        while True:
            remaining = [rank for rank, pid in self._ranks.items() if _runs(pid)]
            if not remaining or time.monotonic() >= deadline_s:
                return remaining
            time.sleep(_LOOK_S)

    def _began(self) -> bool:
        return _file_of(self._metrics) not in (None, self._earlier)

    def _wait(self, reached: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not reached():
            if self._process.poll() is not None:
                raise self._failed(f"ended with {self._process.returncode} before {what}")
            if time.monotonic() > deadline_s:
                raise self._failed(f"does not come to {what} in {timeout_s:g} s")
            time.sleep(_LOOK_S)
        self.ranks()

    def _failed(self, what: str) -> ContractError:
        return ContractError(f"the run {what}.\n{_all_of(self._out)}{_all_of(self._err)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._out.close()
        self._err.close()


def _file_of(path: Path) -> int | None:
    """Inode of the file at a path, which differs from that of earlier files; None if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _children(pid: int) -> list[int]:
    """Ids of a process's children; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _rank_of(pid: int) -> int | None:
    """``RANK`` in a process's environment; None if it has none or has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(value[5:]) for value in variables if value.startswith(b"RANK=")), None)


def _runs(pid: int) -> bool:
    """Whether a process exists and is no zombie: one that has ended, for which nobody has waited."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _all_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


TIMED = (
    "time",
    "seconds",
    "tokens_per_s",
    "model_tflops_per_gpu",
    "checkpoint_blocked_s",
    "checkpoint_bytes",
)
"""Metrics that differ between two runs of the same steps."""
_LAST_BYTES = 1 << 14


def last_step(metrics: Path) -> int:
    """Last step with a complete line in a ``metrics.jsonl``; 0 if there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def history(run_dir: Path) -> dict[int, dict[str, Any]]:
    """A run's metrics of each step, without times. Raises AssertionError if steps repeat or do not ascend."""
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps)), f"{run_dir}: the steps are {steps}"
    return {record["step"]: {key: record[key] for key in record if key not in TIMED} for record in records}


def step_losses(run_dir: Path) -> dict[int, float]:
    """A run's loss of each step. Raises AssertionError if steps repeat or do not ascend."""
    return {step: record["loss"] for step, record in history(run_dir).items()}


def newest(run_dir: Path) -> int:
    """Step of the newest committed checkpoint of a run; 0 if there is none."""
    return max((step for step, _ in checkpoint_dirs(run_dir)), default=0)


def checkpoints(run_dir: Path) -> dict[int, dict[str, bytes]]:
    """Tensors of each committed checkpoint by step."""
    return {step: tensors(folder) for step, folder in checkpoint_dirs(run_dir)}


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint by name: dtype, shape and bits."""
    reader = opened(checkpoint)
    by_name: dict[str, bytes] = {}
    for name, saved in reader.tensors.items():
        bits = reader.read(name).reshape(-1).view(torch.uint8).numpy().tobytes()
        by_name[name] = f"{saved.dtype} {saved.shape} ".encode() + bits
    return by_name
