"""Clocks of a trace: the host's, and that of a GPU, against fakes with PyTorch's signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moefw.tracing.clocks import DeviceClock, HostClock, clock_of


class Future:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def end(self) -> None:
        for callback in self.callbacks:
            callback(self)


class Work:
    def __init__(self, device: Device | None = None) -> None:
        self.future = Future()
        self.device = device

    def get_future(self) -> Future:
        return self.future

    def wait(self) -> None:
        assert self.device is not None
        self.device.log.append(f"{self.device.stream_now} waits for the collective")


def test_data_have_arrived_when_the_last_collective_is_done() -> None:
    clock = HostClock(lambda: 10)
    works = [Work(), Work()]
    seen: list[int] = []
    clock.when_arrived(works, seen.append, over_gloo=True)
    works[0].future.end()
    assert seen == []
    works[1].future.end()
    assert seen == [10]


def test_a_collective_without_a_future_has_no_arrival() -> None:
    class NoFuture:
        def get_future(self) -> Future:
            raise RuntimeError("Work::getFuture not implemented.")

    seen: list[int] = []
    HostClock().when_arrived([NoFuture()], seen.append, over_gloo=True)
    HostClock().when_arrived([object()], seen.append, over_gloo=True)
    assert seen == []


def test_a_clock_of_one_thread_sees_no_arrivals() -> None:
    work = Work()
    HostClock(sees_arrivals=False).when_arrived([work], lambda _: None, over_gloo=True)
    assert work.future.callbacks == []


class Device:
    """A GPU whose streams reach an event when it is recorded, a millisecond later each time."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream_now = "compute"
        self.milliseconds = 0.0

    def Event(self, enable_timing: bool = False) -> Event:
        assert enable_timing
        return Event(self)

    def Stream(self, device: torch.device) -> str:
        return "arrivals"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def synchronize(self, device: torch.device) -> None:
        self.log.append("host waits")


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.reached = -1.0

    def record(self) -> None:
        self.device.milliseconds += 1.0
        self.reached = self.device.milliseconds
        self.device.log.append(f"event in {self.device.stream_now}")

    def synchronize(self) -> None:
        self.device.log.append("host waits for an event")

    def elapsed_time(self, other: Event) -> float:
        return other.reached - self.reached


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    for name in ("Event", "Stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    return device


def test_the_marks_of_a_gpu_are_events_on_the_clock_of_the_host(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefw.tracing.clocks.time.perf_counter_ns", lambda: 5_000_000)
    clock = clock_of(torch.device("cuda", 0))
    assert isinstance(clock, DeviceClock)
    clock.begin()
    marks = [clock.mark(), clock.mark()]
    clock.end()
    assert [clock.nanoseconds(mark) for mark in marks] == [6_000_000, 7_000_000]
    assert gpu.log == [
        "host waits",
        "event in compute",
        "host waits for an event",
        "event in compute",
        "event in compute",
        "host waits",
    ]


def test_a_gpu_tells_arrivals_in_a_stream_that_waits_for_nothing_else(gpu: Device) -> None:
    clock = DeviceClock(torch.device("cuda", 0))
    seen: list[Any] = []
    clock.when_arrived([Work(gpu), Work(gpu)], seen.append, over_gloo=False)
    assert gpu.log == ["arrivals waits for the collective"] * 2 + ["event in arrivals"]
    assert len(seen) == 1
    assert gpu.stream_now == "compute"


def test_a_gpu_does_not_stop_its_host_to_see_what_gloo_moves(gpu: Device) -> None:
    clock = DeviceClock(torch.device("cuda", 0))
    clock.when_arrived([Work(gpu)], lambda _: pytest.fail("noted"), over_gloo=True)
    assert gpu.log == []


def test_a_cpu_has_the_clock_of_its_host() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
