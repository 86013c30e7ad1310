"""Times of messages between every two ranks of a group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.system.stamps import stamp
from moefw_kernels.devices import is_gpu

_SMALL: Final = 100
"""Exchanges whose median is the latency: the host's clock and scheduler disturb single ones."""
_LARGE: Final = 3


@frozen(kw_only=True)
class PairTime:
    """Times of exchanges between two ranks of the world, in which both send at once, as in an all-to-all.

    ``bytes_per_s``: those of each direction.
    """

    ranks: tuple[int, int]
    latency_s: float
    bytes_per_s: float


def pair_times(
    ranks: Sequence[int], rank: int, group: ProcessGroup, device: torch.device, *, large_bytes: int
) -> list[PairTime]:
    """Times between this ``rank`` and each other one of ``ranks``, those of ``group`` in order. Collective.

    In each round every rank has one partner, so that no message waits for another of its group. ``large_bytes``: the
    size of the messages whose time tells the bandwidth.
    """
    device = device if "nccl" in dist.get_backend(group) else torch.device("cpu")
    small = torch.zeros(1, device=device)
    large = torch.zeros(large_bytes // small.itemsize, device=device)
    dist.all_reduce(small, group=group)  # all connect now: NCCL lets pairs use what the whole group has opened
    position = ranks.index(rank)
    times = []
    for number in range(num_rounds(len(ranks))):
        stamp("measuring between ranks")
        partner = partner_in(number, position, len(ranks))
        if partner is not None:
            exchange = _Exchange(ranks[partner], group)
            latency_s = statistics.median(exchange.times_s(small, _SMALL))
            large_s = min(exchange.times_s(large, _LARGE))
            pair = (min(rank, ranks[partner]), max(rank, ranks[partner]))
            times.append(PairTime(ranks=pair, latency_s=latency_s, bytes_per_s=large.nbytes / large_s))
    return times


def num_rounds(size: int) -> int:
    """Number of rounds in which each of ``size`` ranks has met each other one."""
    return size - 1 + size % 2


def partner_in(number: int, position: int, size: int) -> int | None:
    """Position of the partner in a round; None if there is none, as for one of an odd number of ranks.

    The circle method of round-robin tournaments: positions whose sum is the round's number, modulo the rounds, meet,
    and the one that would meet itself meets the last.
    """
    rounds = num_rounds(size)
    last = rounds
    if position == last:
        # The position that doubles to the number: 2 has the inverse (rounds + 1) / 2, as their number is odd.
        return number * (rounds + 1) // 2 % rounds
    partner = (number - position) % rounds
    if partner == position:
        partner = last
    return partner if partner < size else None


class _Exchange:
    """Messages to a partner and back."""

    def __init__(self, partner: int, group: ProcessGroup) -> None:
        self._partner = partner
        self._group = group

    def times_s(self, message: Tensor, times: int) -> list[float]:
        """Seconds of each of some exchanges. One more comes first, for which either may have to wait."""
        received = torch.empty_like(message)
        return [self._time_s(message, received) for _ in range(times + 1)][1:]

    def _time_s(self, message: Tensor, received: Tensor) -> float:
        began = time.perf_counter()
        send = dist.P2POp(dist.isend, message, self._partner, self._group)
        receive = dist.P2POp(dist.irecv, received, self._partner, self._group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        if is_gpu(message.device):
            torch.cuda.synchronize(message.device)
        return time.perf_counter() - began
