"""The log of a step: what the host of a rank does, in order, with the pass and the phase to which it belongs.

It is taken from a trace (:mod:`moefw.tracing`) whose clock is the processor time of the thread that trains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from attrs import evolve, frozen
from torch.distributed import ProcessGroup

from moefw.core.records import Action
from moefw.tracing.clocks import HostClock
from moefw.tracing.replaced import traced
from moefw.tracing.spans import Span
from moefw.tracing.tracer import WEIGHT_GRADIENTS, Sections, Tracer

Kind = Literal["compute", "launch", "wait", "read"]


@frozen
class Event:
    """What the host did, in which phase of which pass.

    A phase of backward has a prime: ``collect'``. ``action``: None outside of passes. ``beside``: its partner in a
    pair. ``seconds``: of ``compute``. ``movement``: the number of what a ``launch`` starts and a ``wait`` awaits.
    ``on_wire_of_rows``: whether a ``read`` queues behind the rows under way, which a communicator of its own does not.
    """

    kind: Kind
    phase: str = ""
    action: Action | None = None
    beside: str | None = None
    seconds: float = 0.0
    movement: int = 0
    nbytes: int = 0
    on_wire_of_rows: bool = False


def in_order(events: Sequence[Event]) -> list[Event]:
    """Events without what differs between ranks: seconds, and the bytes that a router sends."""
    return [evolve(event, seconds=0.0, nbytes=0) for event in events]


class StepLog:
    """What the host does in a step. ``group``: the process group of rows, if there is one."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.events: list[Event] = []
        self._group = None if group is None else group.group_name

    @contextmanager
    def logging(self, sections: Sections, optimizer: Any, *, is_sharded: bool = False) -> Iterator[Sections]:
        """Log the step that runs inside. Yield the clock that its engine is given."""
        spans: list[Span] = []
        tracer = Tracer(HostClock(time.thread_time_ns, sees_arrivals=False), spans.extend)
        with traced(tracer, 1, sections, optimizer=optimizer, is_sharded=is_sharded) as clock:
            yield clock
        self.events = [*self._events(spans)]

    def _events(self, spans: Sequence[Span]) -> Iterator[Event]:
        """Yield what happens at the borders of spans, and what is computed between them."""
        numbers = {_collective(span): number for number, span in enumerate(spans) if span.kind == "movement"}
        borders = sorted((border for span in spans for border in _borders(span)), key=lambda border: border[:2])
        place: dict[str, Any] = {}
        """The phase, or outside of phases the pass, that runs now."""
        is_waiting = False
        since_ns = borders[0][0]
        for now_ns, is_begin, span in borders[1:]:
            if not is_waiting:
                yield Event("compute", **place, seconds=(now_ns - since_ns) * 1e-9)
            since_ns = now_ns
            if span.kind in ("step", "pass", "phase"):
                place = _place(span, is_begin=is_begin)
            elif span.kind == "movement" and is_begin:
                yield Event("launch", **place, movement=numbers[_collective(span)], nbytes=span.nbytes or 0)
            elif span.kind == "wait":
                is_waiting = is_begin
                if is_waiting or not place.get("phase"):
                    continue
                if _collective(span) in numbers:
                    yield Event("wait", **place, movement=numbers[_collective(span)])
                else:
                    yield Event("read", **place, on_wire_of_rows=span.group == self._group)


def _borders(span: Span) -> list[tuple[int, bool, Span]]:
    """Begin and end of a span: the time, whether it is the begin, and the span. Of equal times ends come first."""
    return [(span.begin_ns, True, span), (span.end_ns, False, span)]


def _collective(span: Span) -> tuple[str | None, int | None]:
    """What a movement and the wait for it have in common."""
    return span.group, span.number


def _place(span: Span, *, is_begin: bool) -> dict[str, Any]:
    """Phase and pass that run from a border of a span on."""
    if span.kind == "step" or (span.kind == "pass" and not is_begin):
        return {}
    of_pass = {"action": span.action, "beside": span.beside}
    if span.kind == "pass" or not is_begin:
        return of_pass
    is_backward = span.passing != "F" and span.name != WEIGHT_GRADIENTS
    return {**of_pass, "phase": f"{span.name}'" if is_backward else span.name}
