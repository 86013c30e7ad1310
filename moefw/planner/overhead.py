"""Memory of a GPU that no tensor can have, and what is left beside it and the peak of a plan. Imports no torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from attrs import frozen

from moefw.planner.cluster import GIB, Cluster
from moefw.planner.data_files import Figure, read_file
from moefw.planner.report import Ledger

FILE: Final = Path(__file__).parent / "overhead.yaml"
ALL_TO_ALL: Final = "all-to-all"


@frozen(kw_only=True)
class Overhead:
    """Memory of a GPU beside tensors.

    ``driver_and_context_gib``: of memory as ``nvidia-smi`` tells it. ``communicator_gib``: buffers of NCCL for a group
    of ranks, and ``exchange_gib`` for one that also sends all-to-all, with channels to each other rank.
    ``unused_share``: of the peak, what the allocator holds between tensors and cannot use.
    """

    driver_and_context_gib: Figure
    communicator_gib: Figure
    exchange_gib: Figure
    unused_share: Figure


@cache
def figures() -> Overhead:
    """Figures of moefw."""
    return read_file(Overhead, FILE, option="overhead")


def overhead_bytes(cluster: Cluster, plan: Ledger) -> int:
    """Bytes of a GPU that no tensor of the rank that needs most memory can have; 0 if its peak is unknown.

    0 also where ranks are processes on a CPU: what these need beside tensors is no figure of a cluster.
    """
    if cluster.gpu.threads is not None or plan.peak_bytes is None:
        return 0
    own = figures()
    gib = own.driver_and_context_gib.value
    for kinds in _kinds_by_group(plan).values():
        gib += (own.exchange_gib if ALL_TO_ALL in kinds else own.communicator_gib).value
    return round(GIB * gib + own.unused_share.value * plan.peak_bytes)


def left_bytes(cluster: Cluster, plan: Ledger) -> int | None:
    """Bytes of a GPU that the peak of a plan leaves, negative if it does not fit; None: the peak is unknown."""
    if plan.peak_bytes is None:
        return None
    return cluster.memory_bytes - overhead_bytes(cluster, plan) - plan.peak_bytes


def fits(cluster: Cluster, plan: Ledger) -> bool:
    """Whether the peak of a plan is known and fits a GPU."""
    left = left_bytes(cluster, plan)
    return left is not None and left >= 0


def _kinds_by_group(plan: Ledger) -> dict[str, set[str]]:
    """Kinds of transfers, by the group of ranks, of the rank that needs most memory. Each group is a communicator."""
    kinds: dict[str, set[str]] = {}
    for position in plan.positions:
        if plan.position not in position.at:
            continue
        for work in position.work:
            for transfer in work.transfers:
                if transfer.ranks > 1:
                    kinds.setdefault(transfer.group, set()).add(transfer.kind)
    return kinds
