"""Clocks: what calls take on a device, and what they take of the host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, final

import torch
from torch.nn import functional as F

from moefw_kernels.devices import is_gpu

Call = Callable[[], Any]

REPEAT_S: Final = 0.02
"""Seconds that a repeat takes at least: what the clock and the scheduler add is small beside it."""


class Clock(Protocol):
    """Times calls on a device."""

    def seconds(self, call: Call, times: int) -> float:
        """Seconds of ``times`` calls, one behind the other."""

    def wait(self) -> None:
        """Wait until the device has done what it was given."""

    @property
    def most(self) -> int:
        """The most calls of a repeat."""


def clock_of(device: torch.device) -> Clock:
    """Clock of a device."""
    return GpuClock(device) if is_gpu(device) else HostClock(device)


def calls_of_a_repeat(clock: Clock, call: Call) -> int:
    """Number of calls that take ``REPEAT_S`` or a little more, or the most of the clock. Calls twice."""
    clock.seconds(call, 1)
    one_s = clock.seconds(call, 1)
    return min(clock.most, math.ceil(REPEAT_S / max(one_s, 1e-9)))


@final
class HostClock:
    """Clock of a CPU, which returns from a call when it is done, and of what the host takes for calls on a GPU.

    A rank that computes in one thread is timed by what the thread had of a processor: other work on the machine adds
    nothing to it. Several threads, and those in which PyTorch launches on a GPU, are timed by the clock on the wall.
    """

    most = 10_000

    def __init__(self, device: torch.device) -> None:
        self._now = time.thread_time if in_one_thread(device) else time.perf_counter

    def seconds(self, call: Call, times: int) -> float:
        """See :class:`Clock`."""
        begun = self._now()
        for _ in range(times):
            call()
        return self._now() - begun

    def wait(self) -> None:
        """See :class:`Clock`."""


def in_one_thread(device: torch.device) -> bool:
    """Whether all that this rank computes is computed by the thread that asks for it."""
    return not is_gpu(device) and torch.get_num_threads() == 1


@final
class GpuClock:
    """Clock of a GPU, between two events.

    A product that takes milliseconds comes before the first event. While it runs, the host launches all calls, so that
    none of them waits for its launch: small products would be timed as launches otherwise.
    """

    most = 50
    _HELD: Final = 8192

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held = torch.randn(self._HELD, self._HELD, dtype=torch.bfloat16, device=device)

    def seconds(self, call: Call, times: int) -> float:
        """See :class:`Clock`."""
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        F.linear(self._held, self._held)
        start.record()
        for _ in range(times):
            call()
        stop.record()
        stop.synchronize()
        return 1e-3 * float(start.elapsed_time(stop))

    def wait(self) -> None:
        """See :class:`Clock`."""
        torch.cuda.synchronize(self._device)
