"""Unusual movements on one rank: several in flight, reused handles, odd inputs, failures in between.

Functions of ``(group, rank, case, assembly, ...)``, as in :mod:`moefw.testing.suites.dispatch_ranks`.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor

from moefw.compose.assembly import Assembly
from moefw.core.contracts import Dispatcher
from moefw.core.stages import Routing
from moefw.runtime.phases import PhaseCall
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.dispatch_case import DispatchCase
from moefw.testing.suites.dispatch_ranks import (
    Moved,
    again,
    experts,
    note_gradients,
    opened,
    seen,
    settled_case,
    there_and_back,
)


def other_case(case: DispatchCase) -> DispatchCase:
    """Another micro-batch of the same layer: other numbers of tokens, other routing."""
    tokens = case.tokens[1:] + case.tokens[:1] if len(set(case.tokens)) > 1 else tuple(n + 2 for n in case.tokens)
    return evolve(case, tokens=tokens, seed=case.seed + 101, skew="even")


def micro_batches(case: DispatchCase, count: int) -> list[DispatchCase]:
    """Micro-batches of one layer, the first of them the case."""
    others = [evolve(other_case(case), seed=case.seed + 100 * number) for number in range(1, count)]
    return [case, *others]


def at_once(group: Any, rank: int, case: DispatchCase, assembly: Assembly, order: str, count: int) -> list[Moved]:
    """Results of ``count`` movements on one dispatcher.

    ``order``: "in a row", or all in flight, with finishes and backwards "first first", "last first", or one backward
    "together".
    """
    batches = micro_batches(case, count)
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as dispatcher:
        if order == "in a row":
            return [there_and_back(dispatcher, each, rank, dropless=dropless) for each in batches]
        inputs = [(each.x(rank).requires_grad_(), each.weights(rank).requires_grad_()) for each in batches]
        plans = [dispatcher.plan(each.routing(rank), dropless=dropless) for each in batches]
        dispatching = [dispatcher.start_dispatch(x, w, plan) for (x, w), plan in zip(inputs, plans, strict=True)]
        turns = range(count)[:: -1 if order == "last first" else 1]
        arrived = _by_turns(turns, lambda turn: dispatcher.finish_dispatch(dispatching[turn]))
        rows = [experts(batch, each, rank) for (batch, _), each in zip(arrived, batches, strict=True)]
        combining = [
            dispatcher.start_combine(rows_RD, handle) for rows_RD, (_, handle) in zip(rows, arrived, strict=True)
        ]
        outs = _by_turns(turns, lambda turn: dispatcher.finish_combine(combining[turn]))
        probes = [each.probe(rank) for each in batches]
        if order == "together":
            torch.autograd.backward(outs, probes)
        else:
            for turn in turns:
                outs[turn].backward(probes[turn])
        results = [seen(batch, out_TD) for (batch, _), out_TD in zip(arrived, outs, strict=True)]
        for result, (x_TD, weights_TK) in zip(results, inputs, strict=True):
            note_gradients(result, x_TD, weights_TK)
        return results


def _by_turns(turns: Sequence[int], finish: Callable[[int], Any]) -> list[Any]:
    """Results of movements, by number, which are finished in the order of ``turns``."""
    finished = {turn: finish(turn) for turn in turns}
    return [finished[turn] for turn in sorted(turns)]


def in_phases(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Movement, and the same with a graph of its own for each start and finish."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as dispatcher:
        whole = there_and_back(dispatcher, case, rank, dropless=dropless)
        plan = dispatcher.plan(case.routing(rank), dropless=dropless)
        calls = [PhaseCall() for _ in range(5)]
        inputs = case.x(rank).requires_grad_(), case.weights(rank).requires_grad_()
        pending = calls[0].run(lambda tokens: dispatcher.start_dispatch(tokens[0], tokens[1], plan), inputs)
        batch, handle = calls[1].run(dispatcher.finish_dispatch, pending)
        computed = calls[2].run(lambda arrived: (experts(arrived[0], case, rank), arrived[1]), (batch, handle))
        pending = calls[3].run(lambda rows_and_handle: dispatcher.start_combine(*rows_and_handle), computed)
        out_TD = calls[4].run(dispatcher.finish_combine, pending)
        grads: Sequence[Tensor | None] = [case.probe(rank)] if out_TD.requires_grad else []
        for call in reversed(calls):
            grads = call.backward(grads)
        result = seen(batch, out_TD)
        result.grad_x_TD, result.grad_weights_TK = grads
        result.wants = "xw"
        return whole, result


def handles(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> dict[str, tuple[Moved, Moved]]:
    """Pairs that must be equal: the first movement, and movements along reused handles."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as dispatcher:
        first = there_and_back(dispatcher, case, rank, dropless=dropless)
        plan = dispatcher.plan(case.routing(rank), dropless=dropless)
        batch, handle = dispatcher.dispatch(case.x(rank), case.weights(rank), plan)
        rows_RD = experts(batch, case, rank).detach()
        once = seen(batch, dispatcher.combine(rows_RD, handle))
        pairs = {"combine, the first time": (first, once)}
        pairs["combine with a handle used a second time"] = (once, seen(batch, dispatcher.combine(rows_RD, handle)))
        there_and_back(dispatcher, other_case(case), rank, dropless=dropless)
        pairs["combine after a later movement"] = (once, seen(batch, dispatcher.combine(rows_RD, handle)))
        pairs["redispatch"] = (first, again(dispatcher, case, rank, handle))
        pairs["redispatch with a handle used a second time"] = (first, again(dispatcher, case, rank, handle))
        later = dispatcher.plan(other_case(case).routing(rank), dropless=dropless)
        pairs["redispatch after a later plan"] = (first, again(dispatcher, case, rank, handle))
        second, _ = dispatcher.dispatch(case.x(rank), case.weights(rank), plan)
        pairs["dispatch with a plan used a second time"] = (once, seen(second, once.out_TD))
        batch2, handle2 = dispatcher.redispatch(case.x(rank), case.weights(rank), handle)
        out_TD = dispatcher.combine(experts(batch2, case, rank), handle2)
        pairs["combine with the handle of a redispatch"] = (once, seen(batch2, out_TD))
        assert later is not None
        return pairs


def same_places(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Dispatch, and the redispatch of the same along its handle."""
    with opened(group, case, assembly) as dispatcher:
        plan = dispatcher.plan(case.routing(rank), dropless=settled_case(assembly))
        batch, handle = dispatcher.dispatch(case.x(rank), case.weights(rank), plan)
        redispatched_batch, _ = dispatcher.redispatch(case.x(rank), case.weights(rank), handle)
        out_TD = dispatcher.combine(experts(batch, case, rank), handle)
        return seen(batch, out_TD), seen(redispatched_batch, out_TD)


def redispatched(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Dispatch of twice the tokens and weights, and a redispatch of the same."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as dispatcher:
        doubled: dict[str, Any] = {"x_TD": 2 * case.x(rank), "weights_TK": 2 * case.weights(rank)}
        dispatched = there_and_back(dispatcher, case, rank, dropless=dropless, **doubled)
        plan = dispatcher.plan(case.routing(rank), dropless=dropless)
        _, handle = dispatcher.dispatch(case.x(rank), case.weights(rank), plan)
        return dispatched, again(dispatcher, case, rank, handle, factor=2.0)


def side_by_side(
    group: Any, rank: int, case: DispatchCase, assembly: Assembly, second: DispatchCase, other: LayerCase
) -> list[tuple[Moved, Moved]]:
    """Movements of two dispatchers: each alone, and interleaved with the other."""
    alone = []
    second_assembly = other.assemble()
    for each, of_layer in ((case, assembly), (second, second_assembly)):
        with opened(group, each, of_layer) as dispatcher:
            alone.append(there_and_back(dispatcher, each, rank, dropless=settled_case(of_layer)))
    with opened(group, case, assembly) as first, opened(group, second, second_assembly) as latter:
        pair: list[tuple[Dispatcher[Any, Any], DispatchCase, bool]] = [
            (first, case, settled_case(assembly)),
            (latter, second, settled_case(second_assembly)),
        ]
        # Each stage of both before the next stage of either.
        plans = [dispatcher.plan(each.routing(rank), dropless=dropless) for dispatcher, each, dropless in pair]
        inputs = [(each.x(rank).requires_grad_(), each.weights(rank).requires_grad_()) for _, each, _ in pair]
        arrived = [
            dispatcher.dispatch(x_TD, weights_TK, plan)
            for (dispatcher, _, _), (x_TD, weights_TK), plan in zip(pair, inputs, plans, strict=True)
        ]
        outs = [
            dispatcher.combine(experts(batch, each, rank), handle)
            for (dispatcher, each, _), (batch, handle) in zip(pair, arrived, strict=True)
        ]
        beside = [seen(batch, out_TD) for (batch, _), out_TD in zip(arrived, outs, strict=True)]
        for result, out_TD, (_, each, _), (x_TD, weights_TK) in zip(beside, outs, pair, inputs, strict=True):
            out_TD.backward(each.probe(rank))
            note_gradients(result, x_TD, weights_TK)
    return list(zip(alone, beside, strict=True))


def after_failures(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> dict[str, tuple[Moved, Moved]]:
    """Movement before and after others that were given up: after dispatch, after plan, before backward."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as dispatcher:
        other = other_case(case)
        pairs = {}
        first = there_and_back(dispatcher, case, rank, dropless=dropless)
        plan = dispatcher.plan(other.routing(rank), dropless=dropless)
        dispatcher.dispatch(other.x(rank), other.weights(rank), plan)
        pairs["after experts that failed"] = (first, there_and_back(dispatcher, case, rank, dropless=dropless))
        dispatcher.plan(other.routing(rank), dropless=dropless)
        pairs["after a plan that was not used"] = (first, there_and_back(dispatcher, case, rank, dropless=dropless))
        with torch.no_grad():
            there_and_back(dispatcher, other, rank, dropless=dropless, wants="")
        pairs["after a forward without gradients"] = (first, there_and_back(dispatcher, case, rank, dropless=dropless))
        there_and_back(dispatcher, other, rank, dropless=dropless, wants="x")
        pairs["after tokens alone wanted gradients"] = (
            first,
            there_and_back(dispatcher, case, rank, dropless=dropless),
        )
        return pairs


def reopened(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Movement, and one of a dispatcher built after the first was closed three times."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as dispatcher:
        first = there_and_back(dispatcher, case, rank, dropless=dropless)
        dispatcher.close()
        dispatcher.close()
    with opened(group, case, assembly) as dispatcher:
        return first, there_and_back(dispatcher, case, rank, dropless=dropless)


def odd_inputs(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> dict[str, tuple[Moved, Moved]]:
    """Movements of contiguous tensors, and of equal views."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as dispatcher:
        plain = there_and_back(dispatcher, case, rank, dropless=dropless)
        x_TD = case.x(rank)
        routing = case.routing(rank)
        pairs = {}
        views: Mapping[str, Mapping[str, Any]] = {
            "tokens that are a transposed view": {"x_TD": x_TD.t().contiguous().t()},
            "tokens that are every other row of a tensor": {"x_TD": _every_other(x_TD)},
            "routing weights that are a view": {"weights_TK": routing.weights_TK.t().contiguous().t()},
            "expert ids that are a view": {"routing": _with_ids(routing, _strided(routing.expert_ids_TK))},
        }
        for name, inputs in views.items():
            pairs[name] = (plain, there_and_back(dispatcher, case, rank, dropless=dropless, **inputs))
        outs = {}
        for name in ("contiguous", "view"):
            plan = dispatcher.plan(routing, dropless=dropless)
            batch, handle = dispatcher.dispatch(x_TD, routing.weights_TK, plan)
            rows_RD = experts(batch, case, rank).detach()
            if name == "view":
                rows_RD = _strided(rows_RD)
            rows_RD.requires_grad_()
            out_TD = dispatcher.combine(rows_RD, handle)
            out_TD.sum().backward()  # the gradient of a sum is an expanded scalar
            outs[name] = seen(batch, out_TD)
            outs[name].grad_rows_RD = rows_RD.grad
        pairs["rows that are a view, and a gradient that is expanded"] = (outs["contiguous"], outs["view"])
        return pairs


def _strided(tensor: Tensor) -> Tensor:
    """Equal matrix that is stored by columns."""
    return tensor.t().contiguous().t()


def _every_other(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, 0)[::2]


def _with_ids(routing: Routing, ids_TK: Tensor) -> Routing:
    return Routing(expert_ids_TK=ids_TK, weights_TK=routing.weights_TK, capacity=routing.capacity)


def without_gradients(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved, list[str]]:
    """Movement with gradients, one without, and the latter's faults: saved tensors, required gradients."""
    dropless = settled_case(assembly)
    saved: list[str] = []
    with opened(group, case, assembly) as dispatcher:
        expected = there_and_back(dispatcher, case, rank, dropless=dropless)

        def pack(tensor: Tensor) -> Tensor:
            saved.append(f"a tensor {tuple(tensor.shape)} is saved for backward")
            return tensor

        x_TD = case.x(rank).requires_grad_()
        weights_TK = case.weights(rank).requires_grad_()
        with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            batch, handle = dispatcher.dispatch(
                x_TD, weights_TK, dispatcher.plan(case.routing(rank), dropless=dropless)
            )
            out_TD = dispatcher.combine(experts(batch, case, rank), handle)
        results = {"the rows": batch.rows_RD, "their weights": batch.row_weights_R, "the output": out_TD}
        saved += [f"{name} want gradients" for name, tensor in results.items() if tensor.requires_grad]
        return expected, seen(batch, out_TD), saved


def known_counts(group: Any, rank: int, case: DispatchCase, assembly: Assembly, how: str) -> tuple[Moved, Moved]:
    """Movement planned by exchange, and one with counts on the host: given to plan, or in the routing."""
    dropless = settled_case(assembly)
    counts = [case.counts(source).tolist() for source in range(case.world)]
    with opened(group, case, assembly) as dispatcher:
        exchanged = there_and_back(dispatcher, case, rank, dropless=dropless)
        if how == "given":
            return exchanged, there_and_back(dispatcher, case, rank, dropless=dropless, counts=counts)
        routing = case.routing(rank, counts_host=True)
        return exchanged, there_and_back(dispatcher, case, rank, dropless=dropless, routing=routing)


def unasked_counts(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Movement with counts on the host, and one in a layer where no part asks for them there."""
    dropless = settled_case(assembly)
    layers = {n: evolve(layer, facts={**layer.facts, "counts": "device"}) for n, layer in assembly.layers.items()}
    with opened(group, case, assembly) as dispatcher:
        asked = there_and_back(dispatcher, case, rank, dropless=dropless)
    with opened(group, case, evolve(assembly, layers=layers)) as dispatcher:
        routing = case.routing(rank, num_rows=True)
        return asked, there_and_back(dispatcher, case, rank, dropless=dropless, routing=routing)


def permuted(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Tensor, Tensor]:
    """Output of permuted tokens, and the permuted output."""
    dropless = settled_case(assembly)
    order = torch.randperm(case.tokens[rank], generator=torch.Generator().manual_seed(rank))
    with opened(group, case, assembly) as dispatcher:
        straight = there_and_back(dispatcher, case, rank, dropless=dropless, wants="")
        routing = case.routing(rank)
        routing = Routing(
            expert_ids_TK=routing.expert_ids_TK[order],
            weights_TK=routing.weights_TK[order],
            capacity=routing.capacity,
        )
        shuffled = there_and_back(
            dispatcher, case, rank, dropless=dropless, wants="", routing=routing, x_TD=case.x(rank)[order]
        )
        return shuffled.out_TD, straight.out_TD[order]


def live_tensors(
    group: Any, rank: int, case: DispatchCase, assembly: Assembly, cases: Sequence[DispatchCase]
) -> list[int]:
    """Number of new live tensors after each of four rounds of movements; rank 0 counts for all threads."""
    counts: list[int] = []
    dropless = settled_case(assembly)
    if rank == 0:  # what exists by now is neither collected nor counted: a process of tests has millions of objects
        gc.collect()
        gc.freeze()
    with opened(group, case, assembly) as dispatcher:
        for _ in range(4):
            for each in cases:
                there_and_back(dispatcher, each, rank, dropless=dropless)
            # Ranks may be threads of one process: none of them makes tensors while rank 0 counts.
            dist.barrier(group=group)
            if rank == 0:
                counts.append(_settled_tensors(counts[-1] if len(counts) > 1 else None))
            dist.barrier(group=group)
    return counts


def _settled_tensors(before: int | None) -> int:
    """Number of live tensors; for a second, wait for gloo's threads to release more than ``before``."""
    deadline = time.monotonic() + 1.0
    while True:
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        count = sum(number for kind, number in kinds.items() if issubclass(kind, Tensor))
        if before is None or count <= before or time.monotonic() > deadline:
            return count
        time.sleep(0.01)
