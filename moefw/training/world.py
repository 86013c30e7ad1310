"""The world of ranks: the one that torchrun or Slurm made, or one that we start on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

from attrs import frozen

from moefw.core.errors import PlanError, RunError

LAUNCHED = "MOEFW_LAUNCHED"
"""Set for ranks that :func:`run_local_ranks` started, to the end of a pipe that closes when it is gone."""
MEETING = "MOEFW_MEETING"
"""Set for those ranks, too: a folder that no other user can open, new for each start, in which they meet."""
KEEP_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""glibc settings for ranks on a CPU: freed activations are used again instead of returned and faulted in anew
(a step of the quickstart is 13 to 20 % shorter)."""
_GRACE_S = 10.0


@frozen
class Place:
    """This process among the ranks of a run."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def place_from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that torchrun or Slurm gave this process, or None outside of both.

    Raises PlanError where the variables contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        defaults = (None, None, environment["RANK"], environment["WORLD_SIZE"])
    elif environment.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        defaults = (None, None, "0", _tasks_here(environment))
    else:
        return None
    values = [environment.get(name, default) for name, default in zip(names, defaults, strict=True)]
    try:
        place = Place(*(int(str(value)) for value in values))
    except ValueError as error:
        found = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise PlanError(f"the environment does not name a rank: {found}.", "Each must be a whole number.") from error
    if not 0 <= place.rank < place.world:
        raise PlanError(f"rank {place.rank} is not in a world of {place.world}.", f"Check {names[0]} and {names[1]}.")
    return place


def _tasks_here(environment: Mapping[str, str]) -> str:
    """Return how many tasks Slurm runs on this node, ``3`` of ``2(x2),3`` on the third; ``1`` where it does not say."""
    told = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1"))
    by_node = [tasks for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", told) for _ in range(int(times or 1))]
    node = int(environment.get("SLURM_NODEID", "0"))
    return by_node[node] if node < len(by_node) else "1"


def threads_of_a_rank(local_world: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many threads a rank computes with: ``OMP_NUM_THREADS``, or its share of the cores."""
    told = environment.get("OMP_NUM_THREADS")
    if not told:
        return max(1, (os.cpu_count() or 1) // local_world)
    outermost = told.split(",")[0].strip()
    if not outermost.isdecimal() or not int(outermost):
        raise PlanError(f"OMP_NUM_THREADS is {told!r}, which is no number of threads.", "Unset it, or use a number.")
    return int(outermost)


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started this run's ranks again after one of them had failed."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def rendezvous(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address at which ranks meet, ``tcp://host:port``."""
    host = environment.get("MASTER_ADDR")
    if host is None:
        nodes = environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
        host = re.sub(r"\[(\d+).*", r"\1", nodes.split(",")[0] if "[" not in nodes else nodes)
    job = int(environment.get("SLURM_JOB_ID", "0"))
    return f"tcp://{host}:{environment.get('MASTER_PORT', 29500 + job % 1000)}"


def run_local_ranks(arguments: Sequence[str], world: int) -> int:
    """Start ``world`` processes of this program on this machine and return the exit code of the run.

    When a rank ends badly the others are stopped; so are all when this process ends, however it ends.
    Raises RunError if a rank was killed.
    """
    threads = str(threads_of_a_rank(world))
    leash, our_end = os.pipe()
    shared = {**KEEP_PAGES, **os.environ, "OMP_NUM_THREADS": threads, LAUNCHED: str(leash)}
    meeting = tempfile.mkdtemp(prefix="moefw-")  # of mode 0700
    shared |= {MEETING: meeting, **_on_loopback()}
    command = [sys.executable, "-m", "moefw", *arguments]
    ranks = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment = shared | {name: str(value) for name, value in place.items()}
        ranks.append(subprocess.Popen(command, env=environment, pass_fds=[leash]))
    os.close(leash)
    previous = signal.signal(signal.SIGTERM, lambda *_: _stop(ranks))
    try:
        return _wait(ranks)
    except KeyboardInterrupt:
        return 130
    finally:
        _stop(ranks)
        signal.signal(signal.SIGTERM, previous)
        os.close(our_end)
        shutil.rmtree(meeting, ignore_errors=True)


def _on_loopback() -> dict[str, str]:
    """Return the environment that keeps the sockets of gloo and NCCL off the network."""
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}


def die_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """End this process when the one that launched it is gone. Nothing happens in a process that was not launched."""
    leash = environment.get(LAUNCHED)
    if leash is None:
        return

    def watch() -> None:
        os.read(int(leash), 1)  # returns at the end of the pipe: the launcher holds the only writing end
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    while all(rank.poll() in (None, 0) for rank in ranks):
        if all(rank.poll() == 0 for rank in ranks):
            return 0
        time.sleep(0.05)
    time.sleep(0.2)  # the rank that died first may not be the one that is seen first
    codes = [rank.poll() or 0 for rank in ranks]
    killed = [(index, code) for index, code in enumerate(codes) if code < 0]
    if killed:
        index, code = killed[0]
        what = f"rank {index} was ended by {signal.Signals(-code).name}."
        raise RunError(what, "Continue from the last checkpoint with --resume.")
    return max(codes)


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
