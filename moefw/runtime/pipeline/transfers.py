"""Where in each rank's list of passes it begins to receive, so that both ends begin their transfers in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from attrs import frozen

from moefw.core.errors import PluginError
from moefw.core.records import Action
from moefw.runtime.pipeline.timeline import made, needs


@frozen
class Receive:
    """The start of receiving what the forward (``F``) or the backward (``B``) of a micro-batch in ``stage`` needs."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int


Step = Action | Receive


def with_transfers(
    order: Sequence[Sequence[Action]], rank_of: Callable[[int], int], count: int
) -> tuple[tuple[Step, ...], ...]:
    """Each rank's passes, with the starts of its receives among them. It sends right behind a pass.

    If all passes take equally long, a receiver begins when its sender does. ``count``: the number of stages. Raises
    PluginError if the lists wait for each other.
    """
    steps: list[list[Step]] = [[] for _ in order]
    remaining = [list(reversed(actions)) for actions in order]  # the next pass of a rank is its last element
    done: set[tuple[str, int, int]] = set()
    while any(remaining):
        ready = [
            rank for rank, actions in enumerate(remaining) if actions and done.issuperset(needs(actions[-1], count - 1))
        ]
        if not ready:
            waiting = ", ".join(f"{actions[-1]} on rank {rank}" for rank, actions in enumerate(remaining) if actions)
            raise PluginError(f"the order of the pipeline never ends: {waiting} wait for passes that are not done.")
        # One round: each rank that can runs one pass, and its receiver begins behind what it has run so far.
        for rank in ready:
            action = remaining[rank].pop()
            steps[rank].append(action)
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
