"""A process group that notes every launch and every wait, and may deliver as late as it can: not before the wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from moefw.testing.wrapped_group import Collective, WrappedGroup

UNEVEN: Final = ("all-to-all", "send", "recv")
"""Kinds whose sizes may differ between ranks."""


@frozen
class Event:
    """A ``launch`` or a ``wait`` of the group's collective ``number``; or a ``mark`` of who watches."""

    what: str
    number: int
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        """Name the collective as a fault says it."""
        return f"{self.kind} of {self.dtype.removeprefix('torch.')} {list(self.shape)}"

    def alike(self) -> tuple[Any, ...]:
        """Return what must be the same on every rank."""
        shape = self.shape[1:] if self.kind in UNEVEN else self.shape
        return self.kind, shape, self.dtype


class RecordingGroup(WrappedGroup):
    """Wraps ``inner`` and writes ``events``.

    ``late``: a result lies in its buffer only once its work was waited for; before that the buffer holds NaN. What is
    sent must stay as it is until then: ``overwritten`` names the collectives whose input did not. ``delay_s``: how
    long every launch takes here.
    """

    def __init__(self, inner: Any, *, late: bool = False, delay_s: float = 0.0) -> None:
        super().__init__(inner.rank(), inner.size(), inner)
        self.late, self.delay_s = late, delay_s
        self.events: list[Event] = []
        self.overwritten: list[Event] = []

    def mark(self, name: str) -> None:
        """Note that something happened."""
        self.events.append(Event("mark", -1, name))

    def launches(self) -> list[Event]:
        """Return the launches so far."""
        return [event for event in self.events if event.what == "launch"]

    def under_way(self) -> int:
        """Return how many collectives were launched and not waited for."""
        return len(self.launches()) - len([event for event in self.events if event.what == "wait"])

    def launch(self, collective: Collective) -> Any:
        """Note and pass on; a barrier moves nothing."""
        about = next(iter([*collective.inputs, *collective.outputs]), None)
        if about is None:
            return collective.call([])
        event = Event("launch", len(self.launches()), collective.kind, tuple(about.shape), str(about.dtype))
        self.events.append(event)
        if self.delay_s:
            time.sleep(self.delay_s)
        if not self.late:
            return _Watched(self, event, collective.call([*collective.outputs]), [], [], [])
        places = [torch.empty_like(output) for output in collective.outputs]
        work = collective.call(places)
        for output in collective.outputs:
            output.detach().fill_(float("nan") if output.is_floating_point() else -77)
        return _Watched(self, event, work, [*collective.inputs], [*collective.outputs], places)


class _Watched:
    """The work of a collective; says when it is waited for, and only then delivers."""

    def __init__(
        self,
        recording: RecordingGroup,
        event: Event,
        work: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
        places: list[Tensor],
    ) -> None:
        self._recording, self._event, self._work = recording, event, work
        self._inputs, self._kept = inputs, [tensor.detach().clone() for tensor in inputs]
        self._outputs, self._places = outputs, places
        self._done = False

    def wait(self, *timeout: Any) -> bool:
        """Wait, and deliver."""
        if self._work is not None:
            self._work.wait(*timeout)
        if not self._done:
            self._done = True
            event = self._event
            self._recording.events.append(Event("wait", event.number, event.kind, event.shape, event.dtype))
            if not all(same_bits(a, b) for a, b in zip(self._inputs, self._kept, strict=True)):
                self._recording.overwritten.append(event)
            for output, place in zip(self._outputs, self._places, strict=True):
                output.detach().copy_(place)
        return True

    def is_completed(self) -> bool:
        """Return whether it was waited for."""
        return self._done

    def __getattr__(self, name: str) -> Any:
        """Return what else a work has."""
        return getattr(self._work, name)


@contextmanager
def known(group: Any) -> Iterator[None]:
    """Let ``torch.distributed`` know a group that it did not make: to look up peers of sends, and its rank."""
    ranks: Any = dist.distributed_c10d._world.pg_group_ranks
    ranks[group] = {rank: rank for rank in range(group.size())}
    try:
        yield
    finally:
        ranks.pop(group, None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (tensor.detach().contiguous() for tensor in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.ndim else a.tolist() == b.tolist()
