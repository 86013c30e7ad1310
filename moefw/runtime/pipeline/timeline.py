"""When each pass of a pipeline schedule runs, if every pass has a known duration. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from moefw.core.errors import ContractError, Problem
from moefw.core.records import Action

CHANGE_IN_FLIGHT: Final = {"F": 1, "B": -1, "I": 0, "W": -1}
"""By kind of pass, the change of the number of micro-batches that a stage holds. ``W`` needs what ``I`` leaves."""
Timed = tuple[Any, Any, Action]
"""Start, end and pass. Times are sums of durations, and exact if those are: numbers of any type, such as Fraction."""


def timeline(order: Sequence[Sequence[Action]], cost: Callable[[Action], Any]) -> list[list[Timed]]:
    """When each rank runs its passes, in its order, each as soon as the tensors that it needs are there.

    ``cost`` is the duration of a pass; transfers take no time. Raises ContractError, with what every rank waits for, if
    the order cannot be played to its end.
    """
    last = max(action.stage for actions in order for action in actions)
    ends: dict[tuple[str, int, int], Any] = {}
    played: list[list[Timed]] = [[] for _ in order]

    def is_ready(rank: int) -> bool:
        if len(played[rank]) == len(order[rank]):
            return False
        next_action = order[rank][len(played[rank])]
        return all(need in ends for need in needs(next_action, last))

    while runnable := [rank for rank in range(len(order)) if is_ready(rank)]:
        for rank in runnable:
            action = order[rank][len(played[rank])]
            rank_is_free = played[rank][-1][1] if played[rank] else 0
            start = max([rank_is_free, *(ends[need] for need in needs(action, last))])
            end = start + cost(action)
            ends[made(action)] = end
            played[rank].append((start, end, action))
    waiting = [rank for rank, actions in enumerate(order) if len(played[rank]) < len(actions)]
    if waiting:
        raise ContractError([_waits(rank, order[rank][len(played[rank])], ends, last) for rank in waiting])
    return played


def idle_share(played: Sequence[Sequence[Timed]]) -> list[Any]:
    """Share of the whole time, from 0 to the last end, that each rank idles."""
    duration = max(actions[-1][1] for actions in played)
    return [1 - sum(end - start for start, end, _ in actions) / duration for actions in played]


def most_in_flight(actions: Sequence[Action]) -> int:
    """Largest number of forward passes of a rank whose backward has not ended, weight gradients included."""
    in_flight = 0
    most = 0
    for action in actions:
        in_flight += CHANGE_IN_FLIGHT[action.kind]
        most = max(most, in_flight)
    return most


def made(action: Action) -> tuple[str, int, int]:
    """Kind, stage and micro-batch of what a pass makes.

    Both kinds of backward, ``B`` and ``I``, make the gradient of the stage's input, of kind ``I``.
    """
    kind = "I" if action.kind == "B" else action.kind
    return kind, action.stage, action.micro_batch


def needs(action: Action, last: int) -> Iterator[tuple[str, int, int]]:
    """Yield what a pass waits for, as :func:`made` names it. ``last``: the last stage."""
    stage = action.stage
    micro_batch = action.micro_batch
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
    kind, stage, micro_batch = next(need for need in needs(action, last) if need not in ends)
    awaited = "forward" if kind == "F" else "backward"
    return Problem(f"rank {rank} waits at {action} for the {awaited} of micro-batch {micro_batch} in stage {stage}.")
