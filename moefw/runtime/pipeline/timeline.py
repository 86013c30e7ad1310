"""When each pass of a pipeline schedule runs, if every pass has a known duration. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moefw.core.errors import ContractError, Problem
from moefw.core.records import Action

Timed = tuple[Any, Any, Action]
"""Start, end and pass. Times are sums of durations, and exact if those are: numbers of any type, such as Fraction."""


def timeline(order: Sequence[Sequence[Action]], cost: Callable[[Action], Any]) -> list[list[Timed]]:
    """Return when each rank runs its passes, in its order, each as soon as the tensors that it needs are there.

    ``cost`` is the duration of a pass; transfers take no time. Raises ContractError, with what every rank waits for, if
    the order cannot be played to its end.
    """
    last = max(action.stage for actions in order for action in actions)
    ends: dict[tuple[str, int, int], Any] = {}
    played: list[list[Timed]] = [[] for _ in order]

    def ready(rank: int) -> bool:
        at = len(played[rank])
        return at < len(order[rank]) and all(need in ends for need in _needs(order[rank][at], last))

    while runnable := [rank for rank in range(len(order)) if ready(rank)]:
        for rank in runnable:
            action = order[rank][len(played[rank])]
            free = played[rank][-1][1] if played[rank] else 0
            start = max([free, *(ends[need] for need in _needs(action, last))])
            ends[_made(action)] = start + cost(action)
            played[rank].append((start, ends[_made(action)], action))
    waiting = [rank for rank, actions in enumerate(order) if len(played[rank]) < len(actions)]
    if waiting:
        raise ContractError([_waits(rank, order[rank][len(played[rank])], ends, last) for rank in waiting])
    return played


def idle_share(played: Sequence[Sequence[Timed]]) -> list[Any]:
    """Return the share of the whole time, from the first start to the last end, that each rank idles."""
    whole = max(actions[-1][1] for actions in played)
    return [1 - sum(end - start for start, end, _ in actions) / whole for actions in played]


def most_in_flight(actions: Sequence[Action]) -> int:
    """Return the largest number of forward passes of a rank whose backward has not ended, weight gradients included."""
    held = most = 0
    for action in actions:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, held)
    return most


def _made(action: Action) -> tuple[str, int, int]:
    """Return the name of what a pass makes. Both kinds of backward make the gradient of the stage's input: ``I``."""
    return "I" if action.kind == "B" else action.kind, action.stage, action.micro_batch


def _needs(action: Action, last: int) -> Iterator[tuple[str, int, int]]:
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "W":
        yield "I", stage, micro_batch
    elif action.kind == "F":
        if stage > 0:
            yield "F", stage - 1, micro_batch
    else:
        yield "F", stage, micro_batch
        if stage < last:
            yield "I", stage + 1, micro_batch


def _waits(rank: int, action: Action, ends: dict[tuple[str, int, int], Any], last: int) -> Problem:
    kind, stage, micro_batch = next(need for need in _needs(action, last) if need not in ends)
    awaited = "forward" if kind == "F" else "backward"
    return Problem(f"rank {rank} waits at {action} for the {awaited} of micro-batch {micro_batch} in stage {stage}.")
