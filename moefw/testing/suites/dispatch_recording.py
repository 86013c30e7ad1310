"""Recording of every launch and wait of a rank. Results can be delayed until the wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from moefw.recording.collectives import Collective, Collectives
from moefw.testing.suites.watch import same_bits

UNEVEN: Final = ("all-to-all", "send", "recv")
"""Kinds whose sizes may differ between ranks."""


@frozen
class Event:
    """A ``launch`` or a ``wait`` of the rank's collective ``number``."""

    what: str
    number: int
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        """The collective's name in fault messages."""
        return f"{self.kind} of {self.dtype.removeprefix('torch.')} {list(self.shape)}"

    def alike(self) -> tuple[Any, ...]:
        """Fields that must be equal on every rank."""
        shape = self.shape[1:] if self.kind in UNEVEN else self.shape
        return self.kind, shape, self.dtype


class Recording(Collectives):
    """Records the ``events`` of this thread while it is active.

    ``late``: buffers hold NaN until the wait, which fills in the result. Inputs must not change before the wait:
    ``overwritten`` lists the collectives whose input did. ``delay_s``: delay of every launch in seconds.
    """

    def __init__(self, *, late: bool = False, delay_s: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.late = late
        self.delay_s = delay_s
        self.events: list[Event] = []
        self.overwritten: list[Event] = []
        self._works: list[_Watched] = []
        self._returned: dict[int, _Watched] = {}

    def launches(self) -> list[Event]:
        """Launches so far."""
        return [event for event in self.events if event.what == "launch"]

    def under_way(self) -> int:
        """Number of collectives that were launched and not waited for."""
        return len(self.launches()) - len([event for event in self.events if event.what == "wait"])

    def launch(self, collective: Collective) -> Any:
        """Record the launch and run the collective; a barrier, which sends nothing, is not recorded."""
        tensors = [*collective.inputs, *collective.outputs]
        if not tensors:
            return collective.call([])
        first = tensors[0]
        event = Event("launch", len(self.launches()), collective.kind, tuple(first.shape), str(first.dtype))
        self.events.append(event)
        if self.delay_s:
            time.sleep(self.delay_s)
        inputs = [*collective.inputs] if self.late else []
        places = [output.detach().clone() if self.late else output for output in collective.outputs]
        result = collective.call(places)
        if isinstance(result, Tensor):  # of a functional collective, whose wait names the result in place of a work
            promised = torch.empty_like(result) if self.late else result
            self._returned[_storage(promised)] = _Watched(self, event, None, inputs, [promised], [result])
            return promised
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        self._works.append(_Watched(self, event, work, inputs, collective.outputs, places))
        return collective.answer(self._works[-1])

    def wait(self, result: Tensor) -> Tensor:
        """Wait for the result of a functional collective, and deliver it."""
        watched = self._returned.pop(_storage(result), None)
        if watched is None:
            return super().wait(result)
        super().wait(*watched.places)
        watched.deliver()
        return result


class _Watched(dist.Work):
    """Work handle of a collective. It records the wait, and only then copies ``places`` to ``outputs``."""

    def __init__(
        self,
        recording: Recording,
        event: Event,
        work: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        places: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self._recording = recording
        self._event = event
        self._work = work
        self._inputs = inputs
        self._copies = [tensor.detach().clone() for tensor in inputs]
        self.places = places
        self._late = [(output, place) for output, place in zip(outputs, places, strict=True) if output is not place]
        self._done = False
        for output, _ in self._late:
            # Negative, as no count is, and not -1, which is an id.
            output.detach().fill_(float("nan") if output.is_floating_point() else -77)

    def deliver(self) -> None:
        """Record the wait, and fill the outputs."""
        if self._done:
            return
        self._done = True
        event = self._event
        self._recording.events.append(Event("wait", event.number, event.kind, event.shape, event.dtype))
        if not all(same_bits(tensor, copy) for tensor, copy in zip(self._inputs, self._copies, strict=True)):
            self._recording.overwritten.append(event)
        for output, place in self._late:
            output.detach().copy_(place)

    def wait(self, *timeout: Any) -> bool:
        """Wait, and deliver."""
        self._work.wait(*timeout)
        self.deliver()
        return True

    def is_completed(self) -> bool:
        """Whether the collective is over. Whoever is told so may read its results, as after a wait."""
        if not self._done and self._work.is_completed():
            self.wait()
        return self._done


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
