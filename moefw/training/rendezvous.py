"""The store at which the ranks of a run meet."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from moefw.core.errors import MoefwError, PlanError, RunError
from moefw.system.stamps import stamp
from moefw.training.faults.rank_files import meeting_folder
from moefw.training.world import Address, Place, rendezvous

_RESOLVES_WITHIN_S: Final = 30.0
"""Time for the name of the first machine to appear: one that starts at the same time may have none yet."""
_LOOK_S: Final = 1.0


def meet(place: Place, *, timeout: timedelta) -> Store:
    """Store of this run's ranks. Collective.

    Ranks that moefw started share a file that no other user can open. Under torchrun they use the store of its agents,
    with a separate prefix for each restart, if the agents share it. Elsewhere rank 0 listens on ``MASTER_PORT``. Raises
    PlanError if the host cannot be resolved or the port is in use, RunError if the ranks do not meet.
    """
    store: Store
    if folder := meeting_folder():
        store = FileStore(str(folder / "store"), place.world)
    else:
        address = rendezvous()
        _resolve(address)
        try:
            handler: Any = dist.rendezvous(address.url, place.rank, place.world, timeout=timeout)  # type: ignore[attr-defined]
            store, _, _ = next(handler)
        except dist.DistError as error:
            raise _not_met(place, address, error) from error
        # A store of rank 0 is new in each attempt. Agents count restarts each for itself, so ranks of several would not
        # meet under their counts.
        shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = f"moefw/attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}" if shares_store else "moefw"
        # Jobs whose numbers differ by the number of ports meet at the same one, and must not read each other's keys.
        store = PrefixStore(f"{attempt}/job-{address.job}" if address.job else attempt, store)
    store.set_timeout(timeout)
    return store


def _resolve(address: Address) -> None:
    """Wait until the host of an address has a network address. Raises PlanError if it gets none."""
    deadline_s = time.monotonic() + _RESOLVES_WITHIN_S
    while True:
        try:
            socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline_s:
                reason = getattr(error, "strerror", None) or error
                host = f"the host {address.host!r} ({address.host_from}), where ranks meet,"
                fix = "Set MASTER_ADDR to the name or the address of the machine of rank 0, the same on every rank."
                raise PlanError(f"{host} cannot be resolved: {reason}.", fix) from error
        time.sleep(_LOOK_S)
        stamp("joining the other ranks")


def _not_met(place: Place, address: Address, error: RuntimeError) -> MoefwError:
    """Error that tells what kept this rank from meeting the others."""
    if "EADDRINUSE" in str(error):
        what = f"port {address.port} ({address.port_from}), where ranks meet, is in use on this machine."
        return PlanError(what, "Set MASTER_PORT to a free port, the same on every rank.")
    reason = str(error).partition("\n")[0].rstrip(".")
    what = f"rank {place.rank} has not met the others at {address.host}:{address.port}: {reason}."
    fix = "Start every rank with the same MASTER_ADDR and MASTER_PORT, on machines that reach each other."
    return RunError(what, fix)
