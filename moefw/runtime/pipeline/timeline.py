"""When each pass of a pipeline schedule runs, if every pass has a known duration. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from moefw.core.errors import ContractError, Problem
from moefw.core.records import Action, Entry, Order

CHANGE_IN_FLIGHT: Final = {"F": 1, "B": -1, "I": 0, "W": -1}
"""By kind of pass, the change of the number of micro-batches that a stage holds. ``W`` needs what ``I`` leaves."""
Timed = tuple[Any, Any, Entry]
"""Start, end and what ran. Times are sums of durations: numbers of any type, and exact if those are (Fraction)."""


def timeline(order: Order, cost: Callable[[Action], Any]) -> list[list[Timed]]:
    """When each rank runs its passes, in its order, each as soon as the tensors that it needs are there.

    ``cost`` is the duration of a pass; a pair takes as long as both, and transfers take no time. Raises ContractError,
    with what every rank waits for, if the order cannot be played to its end.
    """
    last = max(action.stage for entries in order for entry in entries for action in entry.passes)
    ends: dict[tuple[str, int, int], Any] = {}
    played: list[list[Timed]] = [[] for _ in order]

    def is_ready(rank: int) -> bool:
        if len(played[rank]) == len(order[rank]):
            return False
        next_entry = order[rank][len(played[rank])]
        return all(need in ends for need in needs(next_entry, last))

    while runnable := [rank for rank in range(len(order)) if is_ready(rank)]:
        for rank in runnable:
            entry = order[rank][len(played[rank])]
            rank_is_free = played[rank][-1][1] if played[rank] else 0
            start = max([rank_is_free, *(ends[need] for need in needs(entry, last))])
            end = start + sum(cost(action) for action in entry.passes)
            ends |= dict.fromkeys(map(made, entry.passes), end)
            played[rank].append((start, end, entry))
    waiting = [rank for rank, entries in enumerate(order) if len(played[rank]) < len(entries)]
    if waiting:
        raise ContractError([_waits(rank, order[rank][len(played[rank])], ends, last) for rank in waiting])
    return played


def idle_share(played: Sequence[Sequence[Timed]]) -> list[Any]:
    """Share of the whole time, from 0 to the last end, that each rank idles."""
    duration = max(actions[-1][1] for actions in played)
    return [1 - sum(end - start for start, end, _ in actions) / duration for actions in played]


def most_in_flight(entries: Sequence[Entry]) -> int:
    """Largest number of forward passes of a rank whose backward has not ended, weight gradients included.

    A pair counts as its forward and then its backward, though it holds less: forward fills what backward frees.
    """
    in_flight = 0
    most = 0
    for entry in entries:
        for action in entry.passes:
            in_flight += CHANGE_IN_FLIGHT[action.kind]
            most = max(most, in_flight)
    return most


def one_by_one(micro_batches: int) -> list[Action]:
    """Order of a single stage without a schedule: each micro-batch forward and backward before the next."""
    order = []
    for number in range(micro_batches):
        order += [Action("F", 0, number), Action("B", 0, number)]
    return order


def made(action: Action) -> tuple[str, int, int]:
    """Kind, stage and micro-batch of what a pass makes.

    Both kinds of backward, ``B`` and ``I``, make the gradient of the stage's input, of kind ``I``.
    """
    kind = "I" if action.kind == "B" else action.kind
    return kind, action.stage, action.micro_batch


def needs(entry: Entry, last: int) -> Iterator[tuple[str, int, int]]:
    """Yield what a pass or a pair waits for, as :func:`made` names it. ``last``: the last stage."""
    for action in entry.passes:
        yield from _needs_of_pass(action, last)


def _needs_of_pass(action: Action, last: int) -> Iterator[tuple[str, int, int]]:
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


def _waits(rank: int, entry: Entry, ends: dict[tuple[str, int, int], Any], last: int) -> Problem:
    need = next(need for need in needs(entry, last) if need not in ends)
    kind, stage, micro_batch = need
    awaited = f"the {'forward' if kind == 'F' else 'backward'} of micro-batch {micro_batch} in stage {stage}"
    if need in map(made, entry.passes):
        first, second = entry.passes
        return Problem(f"rank {rank} runs {first} and {second} as a pair, and one needs the other: {awaited}.")
    return Problem(f"rank {rank} waits at {entry} for {awaited}.")
