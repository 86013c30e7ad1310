"""Starts the ranks of a run on this machine, and ends them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moefw.compose.spec.sections import RunSpec
from moefw.core.errors import PlanError, RunError, os_reason
from moefw.system.folders import temporary_folder
from moefw.training.faults.rank_files import MEETING
from moefw.training.faults.requests import StopRequests
from moefw.training.host_pages import KEEP_PAGES
from moefw.training.local_ranks import LocalRanks, kill
from moefw.training.world import threads_of_a_rank

LAUNCHED: Final = "MOEFW_LAUNCHED"
"""Set for ranks that :func:`run_local_ranks` started: the read end of a pipe that closes when the launcher ends."""
_RANKS_A_CORE: Final = 8
_LEAVE_S: Final = 1.0


def check_room(world: int, *, cores: int) -> None:
    """Raise PlanError if ``world`` ranks are more than a machine with ``cores`` cores can start."""
    most = max(64, _RANKS_A_CORE * cores)
    if world > most:
        what = f"the layout has {world:,} ranks; with {cores} cores, this machine starts {most} at most."
        raise PlanError(
            what, "Start them on several machines with torchrun or Slurm; `moefw check` and `plan` need none."
        )


def run_local_ranks(
    command: Sequence[str], world: int, run: RunSpec, requests: StopRequests, *, memory_note: Callable[[], str]
) -> int:
    """Start ``world`` processes of a command on this machine and return the exit code of the run.

    When a rank fails, the others are ended. When this process ends, in any way, all ranks end. Raises RunError with a
    problem that no rank reports: one was killed, hangs, left too early or ran out of memory (``memory_note`` returns
    the planned and the available memory). Raises StoppedError if a signal came before there was anything to save.
    """
    with _private_folder() as folder, _started(command, world, folder) as processes:
        return LocalRanks(processes, folder, run, requests, memory_note).wait()


def die_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """End this process when its launcher ends. Do nothing in a process without a launcher."""
    leash = environment.get(LAUNCHED)
    if leash is None:
        return

    def watch() -> None:
        os.read(int(leash), 1)  # returns when the pipe closes: the launcher holds the only write end
        shutil.rmtree(environment[MEETING], ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _private_folder() -> Iterator[Path]:
    """Yield a folder of mode 0700 for one attempt."""
    folder = Path(tempfile.mkdtemp(prefix="moefw-", dir=temporary_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(command: Sequence[str], world: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes. At the end, give them a second to exit before they are killed."""
    leash, our_end = os.pipe()
    shared = {**KEEP_PAGES, **os.environ, "OMP_NUM_THREADS": str(threads_of_a_rank(world)), LAUNCHED: str(leash)}
    shared |= {MEETING: str(folder), **_on_loopback()}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with _ignored(signal.SIGINT):
            for rank in range(world):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
                ranks.append(_start(command, shared | {name: str(value) for name, value in place.items()}, leash))
        yield ranks
        _let_leave(ranks)
    finally:
        kill(ranks)
        os.close(leash)
        os.close(our_end)


def _on_loopback() -> dict[str, str]:
    """Environment that keeps the sockets of gloo and NCCL off the network."""
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}


def _start(command: Sequence[str], environment: Mapping[str, str], leash: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=environment, pass_fds=[leash])
    except OSError as error:
        what = f"rank {environment['RANK']} could not be started: {os_reason(error)}."
        raise RunError(what, "Use a layout of fewer ranks, or several machines with torchrun.") from error


@contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    """Let processes that are started inside ignore a signal from their start."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def _let_leave(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _LEAVE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
