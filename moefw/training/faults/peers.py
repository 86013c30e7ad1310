"""Exchange of records between ranks without moefw's launcher: through a store, over a separate connection."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, final

from attrs import frozen

from moefw.core.errors import Problem
from moefw.training.faults.record import RECORD_BYTES, Record, read_record

WATCHERS: Final = (0, 1)
"""The ranks that watch all others: two, as one could itself hang. The others only check for an accusation."""
_ACCUSED: Final = "moefw/accused"


class SilentStoreError(Exception):
    """The store does not answer: the process that keeps it is stopped, or its machine is gone."""


@frozen(kw_only=True)
class Accused:
    """The rank that blocks the others; it runs as ``pid`` on ``machine``. ``by``: the rank that reports it."""

    by: int
    machine: str
    pid: int


@final
class Peers:
    """Messages between ranks during training. ``timeout_s``: seconds that the store may take to answer.

    A separate thread calls the store, as the client waits forever for a server whose process is stopped.
    """

    def __init__(self, store: Any, rank: int, world: int, *, timeout_s: float) -> None:
        self._store = store.clone()
        self._caller = ThreadPoolExecutor(1, "moefw-peers")
        self._rank = rank
        self._timeout_s = timeout_s
        self._known = {each: read_record(bytes(RECORD_BYTES)) for each in range(world)}
        self._missing = set(range(world))

    @property
    def watches(self) -> bool:
        """Whether this rank watches all others."""
        return self._rank in WATCHERS

    @property
    def last(self) -> Mapping[int, Record]:
        """The records read last, by rank; a watcher has those of all ranks."""
        return self._known

    def tell(self, record: bytes) -> None:
        """Publish this rank's record."""
        self._ask("set", f"moefw/rank-{self._rank}", record)

    def look(self) -> Mapping[int, Record]:
        """Read the records of all ranks; a rank that has published none yet has an empty one."""
        self._missing -= {rank for rank in self._missing if self._ask("check", [f"moefw/rank-{rank}"])}
        there = sorted(self._known.keys() - self._missing)
        records = self._ask("multi_get", [f"moefw/rank-{rank}" for rank in there]) if there else []
        self._known |= {rank: read_record(bytes(record)) for rank, record in zip(there, records, strict=True)}
        return self._known

    def accuse(self, accused: Accused) -> bool:
        """Publish which rank hangs; return whether no rank had done so before."""
        own = json.dumps([accused.by, accused.machine, accused.pid])
        return bytes(self._ask("compare_set", _ACCUSED, "", own)) == own.encode()

    def accused(self) -> Accused | None:
        """Rank that is accused of hanging, if any."""
        if not self._ask("check", [_ACCUSED]):
            return None
        by, machine, pid = json.loads(self._ask("get", _ACCUSED))
        return Accused(by=int(by), machine=str(machine), pid=int(pid))

    def _ask(self, operation: str, *arguments: Any) -> Any:
        """Call the store. Raises SilentStoreError if it does not answer, ConnectionError if it is gone."""
        try:
            return self._caller.submit(getattr(self._store, operation), *arguments).result(self._timeout_s)
        except TimeoutError as error:
            raise SilentStoreError from error
        except RuntimeError as error:
            raise ConnectionError from error


def speaker(environment: Mapping[str, str] = os.environ) -> int:
    """Rank that reports a silent store: the first that does not host it."""
    return 0 if _agent_keeps_it(environment) else 1


def silent_store(keeper: Record, timeout_s: float, environment: Mapping[str, str] = os.environ) -> Problem:
    """Problem of a silent store, hosted by ``keeper``, which is rank 0, or by torchrun's agent."""
    who = f"rank 0 ({keeper.host}, pid {keeper.pid}), which keeps the ranks' store,"
    if _agent_keeps_it(environment):
        address = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
        who = f"torchrun, which keeps the ranks' store at {address},"
    what = f"{who} has not answered for {timeout_s:g} s (run.timeout_s): its process is stopped or its machine is gone."
    return Problem(what)


def _agent_keeps_it(environment: Mapping[str, str]) -> bool:
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
