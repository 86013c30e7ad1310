"""The store through which the process groups of a run find their peers."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from moefw.training.faults.board import meeting_folder
from moefw.training.world import Place, rendezvous


def meet(place: Place, *, timeout: timedelta) -> Store:
    """Return the store of this run's ranks. Collective.

    Ranks that moefw started share a file that no other user can open. Under torchrun they use the store of its agents,
    with a separate prefix for each restart. Elsewhere rank 0 listens on ``MASTER_PORT``.
    """
    store: Store
    if folder := meeting_folder():
        store = FileStore(str(folder / "store"), place.world)
    else:
        found: Any = dist.rendezvous(rendezvous(), place.rank, place.world, timeout=timeout)  # type: ignore[attr-defined]
        store, _, _ = next(found)
        store = PrefixStore(f"moefw/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set_timeout(timeout)
    return store
