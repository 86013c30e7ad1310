"""Clocks of a trace: of the host, and of a GPU, which runs behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, final

import torch

from moefw_kernels.devices import is_gpu

Note = Callable[[Any], None]
"""Takes a mark."""


class Clock(Protocol):
    """Takes marks in a step, which are times once the step has ended."""

    def begin(self) -> None:
        """Begin a step."""

    def mark(self) -> Any:
        """The moment at which this rank's compute is now."""

    def when_arrived(self, works: Sequence[Any], note: Note, *, over_gloo: bool) -> None:
        """Note the moment at which all ``works``, collectives under way, are done, if the clock can see it."""

    def end(self) -> None:
        """End a step: wait until all marks are reached."""

    def nanoseconds(self, mark: Any) -> int:
        """Time of a mark."""


@final
class HostClock:
    """The host's clock, for a device that computes while the host calls it: a CPU.

    ``now``: the time in nanoseconds. ``sees_arrivals``: whether it goes on in other threads, so that the one in which a
    collective ends can read it.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns, *, sees_arrivals: bool = True) -> None:
        self.mark = now
        self._sees_arrivals = sees_arrivals

    def begin(self) -> None:
        """Do nothing: the host's clock goes on."""

    def end(self) -> None:
        """Do nothing: all marks are times."""

    def when_arrived(self, works: Sequence[Any], note: Note, *, over_gloo: bool) -> None:
        """Note when the last of the collectives ends, from the thread in which it does."""
        if not self._sees_arrivals or not works:
            return
        with suppress(AttributeError, RuntimeError):  # not every work has a future
            # They are done in order, and each call from another thread costs what a span does not.
            works[-1].get_future().add_done_callback(lambda _: note(self.mark()))

    def nanoseconds(self, mark: int) -> int:
        """The mark: it is a time."""
        return mark


@final
class DeviceClock:
    """Events of a GPU. Each step begins and ends with a wait of the host for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrivals = torch.cuda.Stream(device)
        """Stream that does nothing but wait for collectives."""
        self._begin: Any = None
        self._begin_ns = 0

    def begin(self) -> None:
        """Wait for the device, and set its time to the host's."""
        torch.cuda.synchronize(self._device)
        self._begin = self.mark()
        self._begin.synchronize()
        self._begin_ns = time.perf_counter_ns()

    def mark(self) -> Any:
        """Event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def when_arrived(self, works: Sequence[Any], note: Note, *, over_gloo: bool) -> None:
        """Note an event behind the collectives, unless waiting for them would stop the host, as gloo does."""
        if over_gloo:
            return
        with torch.cuda.stream(self._arrivals):
            for work in works:
                work.wait()
            note(self.mark())

    def end(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def nanoseconds(self, mark: Any) -> int:
        """Time of an event, on the host's clock."""
        milliseconds: float = self._begin.elapsed_time(mark)
        return self._begin_ns + round(milliseconds * 1e6)


def clock_of(device: torch.device) -> Clock:
    """Clock of what a device computes."""
    return DeviceClock(device) if is_gpu(device) else HostClock()
