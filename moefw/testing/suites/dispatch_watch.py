"""Movements that are watched: what the dispatcher keeps, what it launches and what it waits for.

Functions of ``(group, rank, case, assembly, ...)``, as in :mod:`moefw.testing.suites.dispatch_ranks`.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from moefw.testing.suites.watch import bits

DEPTH = 6
"""How deep objects inside objects are looked at."""
CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
PLAIN = (Tensor, int, float, *CONTAINERS)
"""Data of classes and modules that is looked at, whoever wrote its type."""


def kept(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> list[str]:
    """Names of what changed on the dispatcher, its classes and its package, from build to three movements."""
    dropless = settled_case(assembly)
    changed: set[str] = set()
    with opened(group, case, assembly) as dispatcher:
        modules = own_modules(dispatcher, assembly.parts.dispatch)
        before = snapshot(dispatcher, modules)

        def look() -> None:
            changed.update(_changes(before, snapshot(dispatcher, modules)))

        outside = surroundings(alone=case.world == 1)
        plan = dispatcher.plan(case.routing(rank), dropless=dropless)
        look()
        batch, handle = dispatcher.dispatch(case.x(rank), case.weights(rank), plan)
        look()
        dispatcher.combine(experts(batch, case, rank), handle)
        look()
        for micro_batch in (case, other_case(case)):
            there_and_back(dispatcher, micro_batch, rank, dropless=dropless)
            look()
        changed |= _changes(outside, surroundings(alone=case.world == 1))
    return sorted(changed)


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


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def own_modules(dispatcher: Dispatcher[Any, Any], plugin: object) -> list[types.ModuleType]:
    """Modules of the packages in which a dispatcher and its plugin are written, as far as they are imported by now."""
    packages = {_package(type(part).__module__) for part in (dispatcher, plugin)}
    return [module for name, module in list(sys.modules.items()) if _is_in(name, packages)]


def snapshot(dispatcher: Dispatcher[Any, Any], modules: Sequence[types.ModuleType]) -> dict[str, str]:
    """Values that a dispatcher holds, by path: its attributes, and data of its classes and of ``modules``.

    Of a module's objects, those whose class is written in one of these: others, such as compiled kernels, have caches.
    """
    seen: dict[int, object] = {}
    values = dict(_values("self", dispatcher, DEPTH, seen))
    for kind in type(dispatcher).__mro__:
        if kind in Dispatcher.__mro__:
            continue
        for name, value in vars(kind).items():
            if not name.startswith("__") and isinstance(value, (*PLAIN, types.NoneType)):
                values |= _values(f"{kind.__name__}.{name}", value, DEPTH, seen)
    names = {module.__name__ for module in modules}
    for module in modules:
        for name, value in list(vars(module).items()):
            is_own = isinstance(value, PLAIN) or type(value).__module__ in names
            if not name.startswith("__") and is_own:
                values |= _values(f"{module.__name__}.{name}", value, DEPTH, seen)
    return values


def _package(module: str) -> str:
    """Package of whoever wrote a module; of moefw's own, which has caches elsewhere, the folder of its kind."""
    depth = 3 if module.startswith("moefw.") else 1
    return ".".join(module.split(".")[:depth])


def _is_in(module: str, packages: Collection[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _values(path: str, value: Any, depth: int, seen: dict[int, object]) -> Iterator[tuple[str, str]]:
    """Yield the values at a path and below. ``seen`` keeps objects that were yielded, each once, by id."""
    if isinstance(value, Tensor):
        yield path, f"{value.dtype} {tuple(value.shape)} {bits(value).hex()}"
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, range)):
        yield path, repr(value)
    elif depth and id(value) not in seen:
        seen[id(value)] = value
        # Another object in its place is a change; a container may be a new one with the same contents.
        identity = len(value) if isinstance(value, CONTAINERS) else id(value)
        yield path, f"{type(value).__name__} {identity}"
        for name, item in _inside(value):
            yield from _values(f"{path}{name}", item, depth - 1, seen)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container or an object with their names behind its path; none of functions and types."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{{{item!r}}}", None) for item in value)
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType, torch.dtype)):
        if isinstance(value, torch.distributed.ProcessGroup):
            return
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(value, "__dict__", {}), *(name for name in slots if isinstance(name, str))]
        for name in names:
            if not name.startswith("__") and hasattr(value, name):
                yield f".{name}", getattr(value, name)


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
