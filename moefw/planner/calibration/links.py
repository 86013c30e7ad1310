"""What ranks measure together: messages between two, and collectives over all that a link connects. Collective."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Literal

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed import ProcessGroup

from moefw.planner.calibration.alone import MICRO, Measurement
from moefw.planner.calibration.clocks import Call
from moefw.planner.calibration.readings import Reading, reading_of
from moefw.runtime.communication.gather import all_gather, reduce_scatter
from moefw.runtime.communication.pair_times import partner_in
from moefw_kernels.devices import is_gpu

GIGA: Final = 1e9
SMALL: Final = 16
"""Values that a rank has for each other one in a small message."""
LINKS: Final = ("node", "network")
MESSAGES: Final = "messages"
COLLECTIVES: Final = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")

Size = Literal["small", "large"]

SIZES: Final[tuple[Size, ...]] = ("small", "large")
CALLS: Final[Mapping[Size, int]] = {"small": 20, "large": 1}
"""Calls of a repeat."""


@frozen(kw_only=True)
class Group:
    """The ranks that this rank reaches over a link. ``link``: one of ``LINKS``; ``ranks``: of the world, in order."""

    link: str
    ranks: Sequence[int]


def groups_of(rank: int, hosts: Sequence[str]) -> list[Group]:
    """Groups of a rank, of those that have others. ``hosts``: the host of each rank.

    Inside a node all of its ranks; between nodes the ranks of one number in their node, which all send at once. Where
    nodes have different numbers of ranks, the numbers that all have.
    """
    of_host: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        of_host.setdefault(host, []).append(other)
    own = of_host[hosts[rank]]
    number = own.index(rank)
    groups = [Group(link="node", ranks=own)]
    if all(number < len(ranks) for ranks in of_host.values()):
        groups.append(Group(link="network", ranks=[ranks[number] for ranks in of_host.values()]))
    return [group for group in groups if len(group.ranks) > 1]


def opened(groups: Sequence[Sequence[Group]], rank: int) -> dict[str, ProcessGroup]:
    """Process groups of a rank by link. ``groups``: those of all ranks. Collective over the world."""
    found: dict[str, ProcessGroup] = {}
    every = sorted({(group.link, tuple(group.ranks)) for of_rank in groups for group in of_rank})
    for link, ranks in every:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            found[link] = group
    return found


def link_name(link: str, kind: str, size: Size) -> str:
    """Name of the measurement of messages or of a collective."""
    return f"{size} {kind.replace('_', '-')} over the {link}"


def link_measurements(
    link: str, group: ProcessGroup, device: torch.device, *, nbytes: int, repeats: int
) -> Iterator[Measurement]:
    """Yield the measurements of a link in their order, the same on all ranks. ``nbytes``: of a large message.

    A small message is timed for its latency, in microseconds. A large one for what a rank sends to others, in GB/s: as
    all send at once, it receives as much.
    """
    device = device if "nccl" in dist.get_backend(group) else torch.device("cpu")
    for kind in (MESSAGES, *COLLECTIVES):
        for size in SIZES:
            unit = "us" if size == "small" else "GB/s"
            read = partial(_read, kind, group, device, nbytes, size, repeats)
            yield Measurement(name=link_name(link, kind, size), unit=unit, read=read)


def _read(
    kind: str, group: ProcessGroup, device: torch.device, nbytes: int, size: Size, repeats: int
) -> Reading | None:
    """Reading of messages or of a collective; None if this rank has nobody to send to.

    The number of calls is fixed: all ranks must make as many.
    """
    if kind != MESSAGES:
        call, sent = _collective(kind, group, device, nbytes, size)
    else:
        partner = partner_in(0, group.rank(), group.size())
        if partner is None:  # one of an odd number of ranks
            return None
        call, sent = _exchange(partner, group, device, nbytes, size)
    calls = CALLS[size]
    times = [_seconds(call, calls, device) / calls for _ in range(repeats + 1)][1:]  # the first connects
    if size == "small":
        return reading_of(times, figure=lambda taken_s: taken_s / MICRO)
    return reading_of(times, figure=lambda taken_s: sent / taken_s / GIGA)


def _seconds(call: Call, calls: int, device: torch.device) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    if is_gpu(device):
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _exchange(partner: int, group: ProcessGroup, device: torch.device, nbytes: int, size: Size) -> tuple[Call, int]:
    """Messages that this rank and its partner send each other, and the bytes of one."""
    message = torch.zeros(SMALL if size == "small" else nbytes // 4, device=device)
    received = torch.empty_like(message)

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, message, group=group, group_peer=partner),
            dist.P2POp(dist.irecv, received, group=group, group_peer=partner),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return exchange, message.nbytes


def _collective(kind: str, group: ProcessGroup, device: torch.device, nbytes: int, size: Size) -> tuple[Call, int]:
    """A collective on a message of ``nbytes``, and the bytes that a rank sends to others in it."""
    part = SMALL if size == "small" else nbytes // 4 // group.size()
    of_rank = torch.zeros(part, device=device)
    of_all = torch.zeros(part * group.size(), device=device)
    back = torch.empty_like(of_all)
    calls: dict[str, Call] = {
        "all_to_all": partial(dist.all_to_all_single, back, of_all, group=group),
        "all_gather": partial(all_gather, back, of_rank, group=group),
        "reduce_scatter": partial(reduce_scatter, of_rank, of_all, group=group),
        "all_reduce": partial(dist.all_reduce, of_all, group=group),
    }
    # Plans count of a sum the whole tensor to each other rank.
    sent = of_all if kind == "all_reduce" else of_rank
    return calls[kind], sent.nbytes * (group.size() - 1)
