"""Where in each rank's list of passes it begins to receive, so that both ends begin their transfers in one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from attrs import frozen

from moefw.core.errors import PluginError
from moefw.core.records import Action, Entry, Order
from moefw.runtime.pipeline.timeline import made, needs

UNDER_WAY: Final = 2
"""The most sends of a rank whose tensors are kept."""


@frozen
class Receive:
    """The start of receiving what the forward (``F``) or the backward (``B``) of a micro-batch in ``stage`` needs."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int


Step = Entry | Receive


def taken_by(action: Action) -> Receive:
    """What a pass takes, if it comes from another rank. Both parts of a backward count as one."""
    return Receive("F" if action.kind == "F" else "B", action.stage, action.micro_batch)


def with_transfers(order: Order, rank_of: Callable[[int], int], count: int) -> tuple[tuple[Step, ...], ...]:
    """Each rank's passes, with the starts of its receives among them. It sends right behind a pass or a pair.

    If all passes take equally long, a receiver begins when its sender does. ``count``: the number of stages. Raises
    PluginError if the lists wait for each other.
    """
    steps: list[list[Step]] = [[] for _ in order]
    remaining = [list(reversed(entries)) for entries in order]  # what a rank runs next is its last element
    done: set[tuple[str, int, int]] = set()
    while any(remaining):
        ready = [
            rank for rank, entries in enumerate(remaining) if entries and done.issuperset(needs(entries[-1], count - 1))
        ]
        if not ready:
            waiting = ", ".join(f"{entries[-1]} on rank {rank}" for rank, entries in enumerate(remaining) if entries)
            raise PluginError(f"the order of the pipeline never ends: {waiting} wait for passes that are not done.")
        # One round: each rank that can runs one pass or pair, and its receivers begin behind what they have run so far.
        for rank in ready:
            entry = remaining[rank].pop()
            steps[rank].append(entry)
            for action in entry.passes:
                done.add(made(action))
                receive = _receive_of_neighbour(action)
                if receive is not None and 0 <= receive.stage < count and rank_of(receive.stage) != rank:
                    steps[rank_of(receive.stage)].append(receive)
    return tuple(map(tuple, steps))


def _receive_of_neighbour(action: Action) -> Receive | None:
    """Receive that the neighbouring stage begins behind a pass. There may be no such stage."""
    if action.kind == "W":
        return None
    if action.kind == "F":
        return Receive("F", action.stage + 1, action.micro_batch)
    return Receive("B", action.stage - 1, action.micro_batch)
