"""Movements that are watched: what the dispatcher keeps, what it launches and what it waits for.

Functions of ``(group, rank, case, assembly, ...)``, as in :mod:`moefw.testing.suites.dispatch_ranks`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from moefw.compose.assembly import Assembly
from moefw.core.contracts import Dispatcher
from moefw.testing.suites.dispatch_case import DispatchCase
from moefw.testing.suites.dispatch_overlap import other_case
from moefw.testing.suites.dispatch_ranks import Moved, experts, opened, settled_case, there_and_back
from moefw.testing.suites.dispatch_recording import Event, Recording
from moefw.testing.suites.watch import changed, held, held_by_modules


def kept(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> list[str]:
    """Names of what changed on the dispatcher, its classes and its package, from the first movement to the fourth."""
    dropless = settled_case(assembly)
    names: set[str] = set()
    with opened(group, case, assembly) as dispatcher:
        outside = surroundings(alone=case.world == 1)
        held_at_first = held(dispatcher)
        there_and_back(dispatcher, case, rank, dropless=dropless)  # may import, or compile, what it needs
        names.update(f"self{path}" for path in changed(held_at_first, held(dispatcher)))
        before = state(dispatcher, assembly.parts.dispatch)

        def look() -> None:
            names.update(changed(before, state(dispatcher, assembly.parts.dispatch)))

        plan = dispatcher.plan(case.routing(rank), dropless=dropless)
        look()
        batch, handle = dispatcher.dispatch(case.x(rank), case.weights(rank), plan)
        look()
        dispatcher.combine(experts(batch, case, rank), handle)
        look()
        for micro_batch in (case, other_case(case)):
            there_and_back(dispatcher, micro_batch, rank, dropless=dropless)
            look()
        names.update(changed(outside, surroundings(alone=case.world == 1)))
    return sorted(names)


def groups_opened(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[int, int]:
    """How many process groups ``plan`` opens, and how many the rest of a movement. Of the second movement.

    Counted for the whole process, which ranks that are threads share.
    """
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as dispatcher:
        there_and_back(dispatcher, case, rank, dropless=dropless)
        # The function under each way to open one, whatever name a dispatcher has imported.
        with patch.object(distributed_c10d, "_new_group_with_tag", wraps=distributed_c10d._new_group_with_tag) as opens:
            dispatcher.plan(case.routing(rank), dropless=dropless)
            in_plan = opens.call_count
            there_and_back(dispatcher, case, rank, dropless=dropless)
            return in_plan, opens.call_count - 2 * in_plan


def surroundings(*, alone: bool) -> dict[str, str]:
    """Settings of torch that a dispatcher must not change; ``alone``: also the state of its random numbers.

    Threads of one process share that state, so it is looked at only where there is one rank.
    """
    state = {
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.is_grad_enabled()": str(torch.is_grad_enabled()),
        "torch.are_deterministic_algorithms_enabled()": str(torch.are_deterministic_algorithms_enabled()),
    }
    if alone:
        state["torch.get_rng_state()"] = str(hash(torch.get_rng_state().numpy().tobytes()))
    return state


def state(dispatcher: Dispatcher[Any, Any], plugin: object) -> dict[str, object]:
    """Values that a dispatcher, its classes, and the packages that it and its plugin are written in hold, by path."""
    of_modules = {**held_by_modules(type(dispatcher)), **held_by_modules(type(plugin))}
    return {**{f"self{path}": value for path, value in held(dispatcher).items()}, **of_modules}


def recorded(
    group: Any, rank: int, case: DispatchCase, assembly: Assembly, *, late: bool = False, slow: int | None = None
) -> tuple[Moved, list[Event], list[Event]]:
    """Movement with the events of its collectives, and those whose input was overwritten.

    ``late``: results arrive when they are waited for. ``slow``: the rank whose launches take 3 ms.
    """
    with (
        Recording(late=late, delay_s=0.003 if rank == slow else 0.0) as recording,
        opened(group, case, assembly) as dispatcher,
    ):
        result = there_and_back(dispatcher, case, rank, dropless=settled_case(assembly))
        return result, recording.events, recording.overwritten


class _Step(torch.autograd.Function):
    """Work between start and finish, which notes when its backward runs and what is under way then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recording: Recording, name: str, counts: dict[str, int]) -> Tensor:
        ctx.noted = recording, name, counts
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        recording, name, counts = ctx.noted
        counts[name] = recording.under_way()
        return grads[0], None, None, None


def under_way(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> dict[str, int]:
    """How many collectives are under way after each start and finish, and in the backward of work between."""
    counts: dict[str, int] = {}
    with Recording() as recording, opened(group, case, assembly) as dispatcher:
        x_TD = case.x(rank).requires_grad_()
        weights_TK = case.weights(rank).requires_grad_()
        plan = dispatcher.plan(case.routing(rank), dropless=settled_case(assembly))
        counts["plan"] = recording.under_way()
        pending = dispatcher.start_dispatch(x_TD, weights_TK, plan)
        counts["start_dispatch"] = recording.under_way()
        beside: Any = _Step.apply(x_TD, recording, "backward of dispatch", counts)  # type: ignore[no-untyped-call]
        batch, handle = dispatcher.finish_dispatch(pending)
        counts["finish_dispatch"] = recording.under_way()
        rows_RD = experts(batch, case, rank)
        pending = dispatcher.start_combine(rows_RD, handle)
        counts["start_combine"] = recording.under_way()
        after: Any = _Step.apply(x_TD, recording, "backward of combine", counts)  # type: ignore[no-untyped-call]
        out_TD = dispatcher.finish_combine(pending)
        counts["finish_combine"] = recording.under_way()
        torch.autograd.backward([out_TD, beside, after], [case.probe(rank)] * 3)
        counts["the end"] = recording.under_way()
        pending = dispatcher.start_redispatch(x_TD, weights_TK, handle)
        counts["start_redispatch"] = recording.under_way()
        dispatcher.finish_dispatch(pending)
        counts["launched"] = len(recording.launches())
        return counts


def sent_again(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[list[Event], list[Event], int]:
    """Collectives of a dispatch and of its repetition, and how often ``plan`` was called for the latter."""
    plans = 0
    with Recording() as recording, opened(group, case, assembly) as dispatcher:
        plan = dispatcher.plan(case.routing(rank), dropless=settled_case(assembly))
        before = len(recording.launches())
        _, handle = dispatcher.dispatch(case.x(rank), case.weights(rank), plan)
        between = len(recording.launches())
        inner = type(dispatcher).plan

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal plans
            plans += 1
            return inner(dispatcher, *arguments, **options)

        if hasattr(dispatcher, "__dict__"):  # else it has slots, and its class stays as it is
            dispatcher.__dict__["plan"] = counted
        dispatcher.redispatch(case.x(rank), case.weights(rank), handle)
        launches = recording.launches()
        return launches[before:between], launches[between:], plans
