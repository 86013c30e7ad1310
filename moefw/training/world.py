"""The world of ranks that torchrun, Slurm or moefw's launcher created, read from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from attrs import frozen

from moefw.core.errors import PlanError, Problem
from moefw.system.environment import EnvironmentReader
from moefw.system.folders import temporary_folder
from moefw.training.faults.rank_files import meeting_folder


@frozen
class Place:
    """Position of this process among the ranks of a run."""

    rank: int
    world: int
    local_rank: int
    local_world: int


ALONE: Final = Place(0, 1, 0, 1)
"""The place of the only rank."""
_FIRST_PORT: Final = 29500
_PORTS: Final = 1000
"""Ports from the first one on, from which a Slurm job without ``MASTER_PORT`` has one by its number."""


@frozen(kw_only=True)
class Address:
    """The host and the port at which ranks meet. ``host_from`` and ``port_from``: where they are told, in words.

    ``job``: the number of the Slurm job that the port follows from; "" if it is told.
    """

    host: str
    port: int
    host_from: str
    port_from: str
    job: str = ""

    @property
    def url(self) -> str:
        """The address as torch reads it; an IPv6 address is in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def place_from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Place that torchrun or Slurm gave this process, or None outside of both.

    Raises PlanError with each variable that a run cannot use, also those that are read later.
    """
    reader = EnvironmentReader(environment)
    place = _place(reader)
    if place is None:
        reader.number("LOCAL_WORLD_SIZE", 1, least=1)
    elif meeting_folder(environment) is None and (place.world > 1 or reader.problems):
        _address(reader)
    _threads(reader, 1)
    try:
        temporary_folder(environment)
    except PlanError as error:
        reader.problems += error.problems
    reader.raise_problems()
    return place


def _place(reader: EnvironmentReader) -> Place | None:
    environment = reader.environment
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE")
        rank = reader.number("RANK", 0)
        world = reader.number("WORLD_SIZE", 1, least=1)
        local_rank = reader.number("LOCAL_RANK", rank)
        local_world = reader.number("LOCAL_WORLD_SIZE", world, least=1)
    elif environment.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS")
        rank = reader.number("SLURM_PROCID", 0)
        world = reader.number("SLURM_NTASKS", 1, least=1)
        local_rank = reader.number("SLURM_LOCALID", 0)
        if "SLURM_NTASKS_PER_NODE" in environment:
            local_world = reader.number("SLURM_NTASKS_PER_NODE", 1, least=1)
        else:
            local_world = _tasks_here(reader)
    else:
        return None
    if not reader.problems and rank >= world:
        what = f"rank {rank} is not in a world of {world}."
        reader.problems.append(Problem(what, f"Check {names[0]} and {names[1]}."))
    return Place(rank, world, local_rank, local_world)


def _tasks_here(reader: EnvironmentReader) -> int:
    """How many tasks Slurm runs on this node, 3 of ``2(x2),3`` on the third; 1 if unknown."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    name = next((name for name in names if name in reader.environment), None)
    node = reader.number("SLURM_NODEID", 0)
    if name is None:
        return 1
    for part in reader.environment[name].split(","):
        run = re.fullmatch(r"\s*([1-9][0-9]{0,8})(?:\(x([0-9]{1,9})\))?\s*", part, re.ASCII)
        if run is None:
            what = f"{name} is {reader.environment[name]!r}, which is no list of tasks by node, as 2(x3),1 is."
            fix = "Set SLURM_NTASKS_PER_NODE to the number of ranks of a node."
            reader.problems.append(Problem(what, fix))
            return 1
        node -= int(run[2] or 1)
        if node < 0:
            return int(run[1])
    return 1


def threads_of_a_rank(local_world: int, environment: Mapping[str, str] = os.environ) -> int:
    """Number of threads of a rank: ``OMP_NUM_THREADS``, or its share of the cores. Raises PlanError."""
    reader = EnvironmentReader(environment)
    threads = _threads(reader, local_world)
    reader.raise_problems()
    return threads


def _threads(reader: EnvironmentReader, local_world: int) -> int:
    name = "OMP_NUM_THREADS"
    text = reader.environment.get(name)
    if text:
        # A list has the threads of nested regions, too; those of a rank are the outermost.
        outermost = EnvironmentReader({name: text.split(",")[0]})
        threads = outermost.number(name, 1, least=1)
        if not outermost.problems:
            return threads
        what = f"{name} is {text!r}, which is no number of threads."
        reader.problems.append(Problem(what, "Correct it, or unset it."))
    return max(1, (os.cpu_count() or 1) // local_world)


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has restarted this run's ranks after one of them failed."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def rendezvous(environment: Mapping[str, str] = os.environ) -> Address:
    """Address at which ranks meet. Raises PlanError."""
    reader = EnvironmentReader(environment)
    address = _address(reader)
    reader.raise_problems()
    return address


def _address(reader: EnvironmentReader) -> Address:
    environment = reader.environment
    if "MASTER_ADDR" in environment:
        host_from = "MASTER_ADDR"
        host = environment[host_from]
    else:
        host_from = "SLURM_JOB_NODELIST"
        nodes = environment.get(host_from, "127.0.0.1")
        host = re.sub(r"\[(\d+).*", r"\1", nodes.split(",")[0] if "[" not in nodes else nodes)
    if not host:
        fix = "Use the name or the address of the machine of rank 0, the same on every rank."
        reader.problems.append(Problem(f"{host_from} is empty.", fix))
    if "MASTER_PORT" in environment:
        fix = "Use a free port, the same on every rank."
        port = reader.number("MASTER_PORT", _FIRST_PORT, least=1, most=65535, fix=fix)
        return Address(host=host, port=port, host_from=host_from, port_from="MASTER_PORT")
    if "SLURM_JOB_ID" not in environment:
        return Address(host=host, port=_FIRST_PORT, host_from=host_from, port_from="as MASTER_PORT is not set")
    job = reader.number("SLURM_JOB_ID", 0, fix="Set MASTER_PORT to a free port, the same on every rank.")
    port_from = f"{_FIRST_PORT} + SLURM_JOB_ID modulo {_PORTS}"
    return Address(host=host, port=_FIRST_PORT + job % _PORTS, host_from=host_from, port_from=port_from, job=str(job))
