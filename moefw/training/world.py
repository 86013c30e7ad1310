"""The world of ranks that torchrun, Slurm or moefw's launcher created, read from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from attrs import frozen

from moefw.core.errors import PlanError


@frozen
class Place:
    """Position of this process among the ranks of a run."""

    rank: int
    world: int
    local_rank: int
    local_world: int


ALONE: Final = Place(0, 1, 0, 1)
"""The place of the only rank."""


def place_from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that torchrun or Slurm gave this process, or None outside of both.

    Raises PlanError if the variables contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        defaults = (None, None, environment["RANK"], environment["WORLD_SIZE"])
    elif environment.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        defaults = (None, None, "0", _tasks_here(environment))
    else:
        return None
    _check_port(environment.get("MASTER_PORT"))
    values = [environment.get(name, default) for name, default in zip(names, defaults, strict=True)]
    try:
        place = Place(*(int(str(value)) for value in values))
    except ValueError as error:
        found = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise PlanError(f"the environment does not name a rank: {found}.", "Each must be a whole number.") from error
    if not 0 <= place.rank < place.world:
        raise PlanError(f"rank {place.rank} is not in a world of {place.world}.", f"Check {names[0]} and {names[1]}.")
    return place


def _check_port(told: str | None) -> None:
    if told is None or (told.isdecimal() and told.isascii() and 0 < int(told) < 1 << 16):
        return
    raise PlanError(
        f"MASTER_PORT is {told!r}, which is no port.", "Use a number from 1 to 65535, the same on every rank."
    )


def _tasks_here(environment: Mapping[str, str]) -> str:
    """Return how many tasks Slurm runs on this node, ``3`` of ``2(x2),3`` on the third; ``1`` if unknown."""
    told = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1"))
    by_node = [tasks for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", told) for _ in range(int(times or 1))]
    node = int(environment.get("SLURM_NODEID", "0"))
    return by_node[node] if node < len(by_node) else "1"


def threads_of_a_rank(local_world: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of threads of a rank: ``OMP_NUM_THREADS``, or its share of the cores."""
    told = environment.get("OMP_NUM_THREADS")
    if not told:
        return max(1, (os.cpu_count() or 1) // local_world)
    outermost = told.split(",")[0].strip()
    if not outermost.isdecimal() or not int(outermost):
        raise PlanError(f"OMP_NUM_THREADS is {told!r}, which is no number of threads.", "Unset it, or use a number.")
    return int(outermost)


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun has restarted this run's ranks after one of them failed."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def rendezvous(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address at which ranks meet, ``tcp://host:port``."""
    host = environment.get("MASTER_ADDR")
    if host is None:
        nodes = environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
        host = re.sub(r"\[(\d+).*", r"\1", nodes.split(",")[0] if "[" not in nodes else nodes)
    job = int(environment.get("SLURM_JOB_ID", "0"))
    return f"tcp://{host}:{environment.get('MASTER_PORT', 29500 + job % 1000)}"
