"""A virtual clock: how long a rank's step takes if compute and one wire run beside each other, each in order.

The log of a step (``step_log.py``) is what the host did, in order: it computed, launched a movement of rows, waited for
one, or read metadata that other ranks had sent. A movement starts when it is launched and the wire is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from step_log import Event


@frozen
class Replayed:
    """Seconds of a step on the virtual clock."""

    compute: float
    wire: float
    """Seconds in which rows travel."""
    exposed: float
    """Seconds in which compute waits for the wire."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.exposed

    @property
    def hidden(self) -> float:
        """Share of the wire's time beside which something is computed; 1 without movements."""
        return 1.0 - self.exposed / self.wire if self.wire else 1.0


def replay(events: Sequence[Event], travel: Callable[[Event], float]) -> Replayed:
    """Play a log. ``travel``: seconds in which the movement of a ``launch`` travels.

    Raises ValueError if a movement is waited for that was not launched.
    """
    now = compute = wire = exposed = 0.0
    wire_is_free = 0.0
    arrives: dict[int, float] = {}
    for event in events:
        awaited = now
        if event.kind == "compute":
            now += event.seconds
            compute += event.seconds
            continue
        if event.kind == "launch":
            seconds = travel(event)
            wire_is_free = max(now, wire_is_free) + seconds
            wire += seconds
            arrives[event.movement] = wire_is_free
        elif event.kind == "wait":
            if event.movement not in arrives:
                raise ValueError(f"movement {event.movement} is waited for and was not launched")
            awaited = arrives[event.movement]
        elif event.on_wire_of_rows:
            awaited = wire_is_free
        exposed += max(0.0, awaited - now)
        now = max(now, awaited)
    return Replayed(compute, wire, exposed)
