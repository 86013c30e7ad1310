"""Commands in copies of a process that has imported torch, because the imports cost a new process seconds.

A copy is a process of its own, in a session of its own. The ranks that a launcher or torchrun starts in it are copies
too. What a command imports, and what ``/proc`` says of its start, only ``subprocess`` shows. Runs are those
of ``bare_runs``.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from bare_runs import make_runs_bare
from moefw.testing import pool
from moefw.testing.pool import copies_context
from moefw.training import launcher


class Copy:
    """A command such as ``["moefw", "train", spec]``, with the interface of ``subprocess.Popen``."""

    def __init__(
        self, command: Sequence[object], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.args = [str(word) for word in command]
        self._said = tempfile.TemporaryDirectory()
        given = (self.args, str(cwd or Path.cwd()), dict(os.environ if env is None else env), self._said.name)
        self._process = copies_context().Process(target=_copy, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end, and return what the command and its ranks wrote to stdout and stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._wrote("out"), self._wrote("err")

    def _wrote(self, name: str) -> str:
        return Path(self._said.name, name).read_text(errors="replace")


def run(
    *command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Return the exit code and the output of a command."""
    process = Copy(command, cwd=cwd, env=env)
    out, err = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Rank:
    """A rank, a copy of its launcher, with what the launcher or torchrun asks of ``subprocess.Popen``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], leash: int | None) -> None:
        sys.stdout.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _become_a_rank(command, environment, leash)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = 280) -> None:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _copy(command: list[str], folder: str, environment: dict[str, str], said: str) -> None:
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{said}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    multiprocessing.context._concrete_contexts["forkserver"] = multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    pool.ensure_running = lambda: None  # type: ignore[attr-defined]
    launcher._start = lambda command, environment, leash: Rank(command[3:], environment, leash)  # type: ignore[assignment]
    SubprocessHandler._popen = lambda _, command, environment: Rank(command[3:], environment, None)  # type: ignore[assignment]
    make_runs_bare()
    _run(command, environment)


def _become_a_rank(command: Sequence[str], environment: Mapping[str, str], leash: int | None) -> None:
    """Forget the signal handlers and files of the launcher, as a new program would, and run the command."""
    try:
        if leash is None:
            os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        for file in map(int, os.listdir("/proc/self/fd")):
            if file > 2 and file != leash:
                os.closerange(file, file + 1)
        _run(command, environment)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
