"""Where in each rank's list of passes it begins to receive, so that both ends begin their transfers in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from attrs import frozen

from moefw.core.errors import PluginError
from moefw.core.records import Action


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
        ready = [rank for rank, actions in enumerate(left) if actions and _needs(actions[-1], count) <= done]
        if not ready:
            waiting = ", ".join(f"{actions[-1]} on rank {rank}" for rank, actions in enumerate(left) if actions)
            raise PluginError(f"the order of the pipeline never ends: {waiting} wait for passes that are not done.")
        for rank in ready:
            action = left[rank].pop()
            steps[rank].append(action)
            done.add(("B" if action.kind == "I" else action.kind, action.stage, action.micro_batch))
            received = _received(action)
            if received is not None and 0 <= received.stage < count and rank_of(received.stage) != rank:
                steps[rank_of(received.stage)].append(received)
    return tuple(map(tuple, steps))


def _needs(action: Action, count: int) -> set[tuple[str, int, int]]:
    """Return the passes whose results a pass needs."""
    stage, number = action.stage, action.micro_batch
    if action.kind == "F":
        return {("F", stage - 1, number)} if stage else set()
    if action.kind == "W":
        return {("B", stage, number)}
    return {("F", stage, number)} | ({("B", stage + 1, number)} if stage + 1 < count else set())


def _received(action: Action) -> Receive | None:
    """Return what the neighbour begins to receive behind a pass."""
    if action.kind == "W":
        return None
    if action.kind == "F":
        return Receive("F", action.stage + 1, action.micro_batch)
    return Receive("B", action.stage - 1, action.micro_batch)
