"""What ranks measure together: messages between two, and collectives over all that a link connects. Collective.

On a CPU ranks compute between two collectives, as in a step. The threads that carry a collective wake while all cores
compute and wait for them, and the caches lose what the layers keep there: several times what a collective takes that
follows the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Final, Literal

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed import ProcessGroup

from moefw.planner.calibration.alone import MICRO, Measurement, work_of_a_layer
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

AT_THE_END: Final = "all_reduce"
"""The collective for which ranks wait once the last one was launched, as a step does for the sums of its gradients."""

Size = Literal["small", "medium", "large"]

SIZES: Final[tuple[Size, ...]] = ("small", "medium", "large")
CALLS: Final[Mapping[Size, int]] = {"small": 20, "medium": 10, "large": 4}
"""Calls of a repeat."""
MEDIUM: Final = 32
"""Medium messages in a large one."""


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


def processor_name(link: str, kind: str, size: Size) -> str:
    """Name of the measurement of what a collective takes of processors."""
    return f"processors in {link_name(link, kind, size)}"


def link_measurements(
    link: str, group: ProcessGroup, device: torch.device, *, nbytes: int, repeats: int
) -> Iterator[Measurement]:
    """Yield the measurements of a link in their order, the same on all ranks. ``nbytes``: of a large message.

    Messages between two ranks follow each other. A small one is timed for its latency, in microseconds, a large one for
    what a rank sends, in GB/s: as both send at once, it receives as much. A collective of each size is timed for the
    microseconds that it adds to a rank, see :func:`bytes_sent`, and, of ranks on a CPU, for those of its processors.
    """
    device = device if "nccl" in dist.get_backend(group) else torch.device("cpu")
    for size in ("small", "large"):
        unit = "us" if size == "small" else "GB/s"
        read: Callable[[], Reading | None] = partial(_messages, group, device, nbytes, size, repeats)
        yield Measurement(name=link_name(link, MESSAGES, size), unit=unit, read=read)
    between = _nothing if is_gpu(device) else work_of_a_layer(device)
    for kind in COLLECTIVES:
        for size in SIZES:
            read = partial(_collective, kind, group, device, nbytes, size, repeats, between)
            yield Measurement(name=link_name(link, kind, size), unit="us", read=read)
            if not is_gpu(device):
                of_processors = partial(read, clock=time.process_time)
                yield Measurement(name=processor_name(link, kind, size), unit="us", read=of_processors)


def bytes_sent(kind: str, ranks: int, nbytes: int, size: Size) -> int:
    """Bytes that a rank sends to others in a collective. ``nbytes``: of a large message.

    Of a sum plans count the whole tensor to each other rank.
    """
    part = 4 * _values(nbytes, size, ranks)
    return part * (ranks - 1) * (ranks if kind == "all_reduce" else 1)


def _values(nbytes: int, size: Size, ranks: int) -> int:
    """Values of fp32 that a rank has for each other one."""
    if size == "small":
        return SMALL
    return max(1, nbytes // 4 // ranks // (MEDIUM if size == "medium" else 1))


def _nothing() -> None:
    """Nothing is computed between transfers."""


def _messages(group: ProcessGroup, device: torch.device, nbytes: int, size: Size, repeats: int) -> Reading | None:
    """Reading of messages; None if this rank has nobody to send to.

    The number of calls is fixed: all ranks must make as many.
    """
    partner = partner_in(0, group.rank(), group.size())
    if partner is None:  # one of an odd number of ranks
        return None
    message = torch.zeros(SMALL if size == "small" else nbytes // 4, device=device)
    received = torch.empty_like(message)

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, message, group=group, group_peer=partner),
            dist.P2POp(dist.irecv, received, group=group, group_peer=partner),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    calls = CALLS[size]
    times = [_seconds(exchange, calls, device) / calls for _ in range(repeats + 1)][1:]  # the first connects
    if size == "small":
        return reading_of(times, figure=lambda taken_s: taken_s / MICRO)
    return reading_of(times, figure=lambda taken_s: message.nbytes / taken_s / GIGA)


def _collective(
    kind: str,
    group: ProcessGroup,
    device: torch.device,
    nbytes: int,
    size: Size,
    repeats: int,
    between: Call,
    clock: Callable[[], float] = time.perf_counter,
) -> Reading:
    """Reading of what a collective adds to a rank that calls ``between`` before each, by a clock.

    Raises RuntimeError if that is less than what differs without it.
    """
    calls = CALLS[size]
    launches = [_launch(kind, group, device, _values(nbytes, size, group.size())) for _ in range(calls)]

    def with_collectives() -> None:
        under_way = []
        for launch in launches:
            between()
            work = launch()
            if kind == AT_THE_END:
                under_way.append(work)
            else:
                work.wait()
        for work in under_way:
            work.wait()

    def without() -> None:
        for _ in launches:
            between()

    def added_s() -> float:
        taken = []
        for call in (without, with_collectives):
            dist.barrier(group)
            taken.append(_seconds(call, 1, device, clock))
        return (taken[1] - taken[0]) / calls

    times = [added_s() for _ in range(repeats + 1)][1:]  # the first connects
    if median(times) <= 0:
        raise RuntimeError("it adds less than the same work differs without it")
    return reading_of(times, figure=lambda taken_s: taken_s / MICRO)


def _seconds(call: Call, calls: int, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    for _ in range(calls):
        call()
    if is_gpu(device):
        torch.cuda.synchronize(device)
    return clock() - begun


def _launch(kind: str, group: ProcessGroup, device: torch.device, part: int) -> Call:
    """Launch of a collective on buffers of its own. ``part``: values that a rank has for each other one."""
    of_rank = torch.zeros(part, device=device)
    of_all = torch.zeros(part * group.size(), device=device)
    back = torch.empty_like(of_all)
    calls: dict[str, Call] = {
        "all_to_all": partial(dist.all_to_all_single, back, of_all, group=group, async_op=True),
        "all_gather": partial(all_gather, back, of_rank, group=group, async_op=True),
        "reduce_scatter": partial(reduce_scatter, of_rank, of_all, group=group, async_op=True),
        "all_reduce": partial(dist.all_reduce, of_all, group=group, async_op=True),
    }
    return calls[kind]
