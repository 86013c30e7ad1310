"""A process group that notes every launch and every wait, and may deliver as late as it can: not before the wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

_ProcessGroup: Any = dist.ProcessGroup
"""Its methods are overloaded, and named otherwise in each version of torch."""

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


class Witness(_ProcessGroup):  # type: ignore[misc]
    """Wraps ``inner`` and writes ``events``.

    ``late``: a result lies in its buffer only once its work was waited for; before that the buffer holds NaN. What is
    sent must stay as it is until then: ``overwritten`` names the collectives whose input did not. ``delay_s``: how
    long every launch takes here.
    """

    def __init__(self, inner: Any, *, late: bool = False, delay_s: float = 0.0) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.late, self.delay_s = inner, late, delay_s
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

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Note and pass on."""

        def call(places: Sequence[Tensor]) -> Any:
            return self.inner.alltoall_base(places[0], input, output_splits, input_splits, *_given(opts))

        return self._launch("all-to-all", [input], [output], call)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Note and pass on."""
        return self._launch(
            "all-gather", [input], [output], lambda places: self.inner._allgather_base(places[0], input, *_given(opts))
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Note and pass on."""
        return self._launch(
            "all-gather", inputs, outputs[0], lambda places: self.inner.allgather([places], inputs, *_given(opts))
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Note and pass on."""
        return self._launch(
            "reduce-scatter",
            [input],
            [output],
            lambda places: self.inner._reduce_scatter_base(places[0], input, opts),
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Note and pass on."""
        return self._launch(
            "reduce-scatter",
            inputs[0],
            outputs,
            lambda places: self.inner.reduce_scatter(places, inputs, *_given(opts)),
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Note and pass on."""
        return self._in_place("all-reduce", tensors, lambda places: self.inner.allreduce(places, *_given(opts)))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Note and pass on."""
        return self._in_place("broadcast", tensors, lambda places: self.inner.broadcast(places, *_given(opts)))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Note and pass on."""
        return self._launch(
            "all-to-all", inputs, outputs, lambda places: self.inner.alltoall(places, inputs, *_given(opts))
        )

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Note and pass on."""
        return self._launch("send", tensors, [], lambda _: self.inner.send(tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Note and pass on."""
        return self._launch("recv", [], tensors, lambda places: self.inner.recv(places, peer, tag))

    def barrier(self, opts: Any = None) -> Any:
        """Pass on."""
        return self.inner.barrier(*_given(opts))

    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _in_place(self, kind: str, tensors: list[Tensor], call: Callable[[list[Tensor]], Any]) -> Any:
        given = [tensor.clone() for tensor in tensors]

        def fill(places: list[Tensor]) -> Any:
            for place, tensor in zip(places, given, strict=True):
                place.copy_(tensor)
            return call(places)

        return self._launch(kind, [], tensors, fill)

    def _launch(
        self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], call: Callable[[list[Tensor]], Any]
    ) -> Any:
        about = next(iter([*inputs, *outputs]))
        event = Event("launch", len(self.launches()), kind, tuple(about.shape), str(about.dtype))
        self.events.append(event)
        if self.delay_s:
            time.sleep(self.delay_s)
        if not self.late:
            return _Watched(self, event, call(list(outputs)), [], [], [])
        places = [torch.empty_like(output) for output in outputs]
        work = call(places)
        for output in outputs:
            output.detach().fill_(float("nan") if output.is_floating_point() else -77)
        return _Watched(self, event, work, list(inputs), list(outputs), places)


class _Watched:
    """The work of a collective; says when it is waited for, and only then delivers."""

    def __init__(
        self,
        witness: Witness,
        event: Event,
        work: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
        places: list[Tensor],
    ) -> None:
        self._witness, self._event, self._work = witness, event, work
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
            self._witness.events.append(Event("wait", event.number, event.kind, event.shape, event.dtype))
            if not all(same_bits(a, b) for a, b in zip(self._inputs, self._kept, strict=True)):
                self._witness.overwritten.append(event)
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


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)
