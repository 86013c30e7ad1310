"""Streams and events that only record requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class FakeEvent:
    def __init__(self, log: list[tuple[Any, ...]], stream: str, number: int) -> None:
        self.log, self.stream, self.number = log, stream, number

    def synchronize(self) -> None:
        self.log.append(("host waits", self.number))


class FakeStream:
    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.log, self.name, len(self.log))
        self.log.append(("record", self.name, event.number))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("wait", self.name, event.number))


class FakeCuda:
    """Records the requests to streams and events, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._names = iter(("out", "back"))
        self._compute = FakeStream("compute", self.log)

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(next(self._names), self.log)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._compute

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(("copy", stream.name))
        yield

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.log.append(("of", device))
        yield
