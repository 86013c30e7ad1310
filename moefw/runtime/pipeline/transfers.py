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
    """Return each rank's list with what it receives. It sends right behind a pass. ``count``: the number of stages.

    A receiver begins when the sender does if all passes take equally long. Raises PluginError if the lists wait for
    each other.
    """
    steps: list[list[Step]] = [[] for _ in order]
    left, done = [list(reversed(actions)) for actions in order], set[tuple[str, int, int]]()
    while any(left):
        ready = [
            rank for rank, actions in enumerate(left) if actions and done.issuperset(needs(actions[-1], count - 1))
        ]
        if not ready:
            waiting = ", ".join(f"{actions[-1]} on rank {rank}" for rank, actions in enumerate(left) if actions)
            raise PluginError(f"the order of the pipeline never ends: {waiting} wait for passes that are not done.")
        for rank in ready:
            action = left[rank].pop()
            steps[rank].append(action)
            done.add(made(action))
            received = _received(action)
            if received is not None and 0 <= received.stage < count and rank_of(received.stage) != rank:
                steps[rank_of(received.stage)].append(received)
    return tuple(map(tuple, steps))


def _received(action: Action) -> Receive | None:
    """Return what the neighbour begins to receive behind a pass."""
    if action.kind == "W":
        return None
    if action.kind == "F":
        return Receive("F", action.stage + 1, action.micro_batch)
    return Receive("B", action.stage - 1, action.micro_batch)
