"""Unusual movements on one rank: several in flight, reused handles, odd inputs, failures in between.

Functions of ``(group, rank, case, assembly, ...)``, as in :mod:`moefw.testing.suites.dispatch_ranks`.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Mapping, Sequence
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
from moefw.testing.suites.dispatch_ranks import Moved, again, experts, opened, seen, settled_case, there_and_back


def other_case(case: DispatchCase) -> DispatchCase:
    """Return another micro-batch of the same layer: other numbers of tokens, other routing."""
    tokens = case.tokens[1:] + case.tokens[:1] if len(set(case.tokens)) > 1 else tuple(n + 2 for n in case.tokens)
    return evolve(case, tokens=tokens, seed=case.seed + 101, skew="even")


def two_at_once(group: Any, rank: int, case: DispatchCase, assembly: Assembly, order: str) -> list[Moved]:
    """Return two movements on one dispatcher.

    ``order``: "in a row", or interleaved, with finish and backward "A first", "B first", or one backward "together".
    """
    pair = (case, other_case(case))
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as moves:
        if order == "in a row":
            return [there_and_back(moves, one, rank, dropless=dropless) for one in pair]
        inputs = [(one.x(rank).requires_grad_(), one.weights(rank).requires_grad_()) for one in pair]
        plans = [moves.plan(one.routing(rank), dropless=dropless) for one in pair]
        there = [moves.start_dispatch(x, w, plan) for (x, w), plan in zip(inputs, plans, strict=True)]
        turns = (1, 0) if order == "B first" else (0, 1)
        came = {turn: moves.finish_dispatch(there[turn]) for turn in turns}
        arrived = [came[0], came[1]]
        rows = [experts(batch, one, rank) for (batch, _), one in zip(arrived, pair, strict=True)]
        back = [moves.start_combine(row, handle) for row, (_, handle) in zip(rows, arrived, strict=True)]
        home = {turn: moves.finish_combine(back[turn]) for turn in turns}
        outs = [home[0], home[1]]
        probes = [one.probe(rank) for one in pair]
        if order == "together":
            torch.autograd.backward(outs, probes)
        else:
            for turn in turns:
                outs[turn].backward(probes[turn])
        results = [seen(batch, out) for (batch, _), out in zip(arrived, outs, strict=True)]
        for result, (x, w) in zip(results, inputs, strict=True):
            result.grad_x_TD, result.grad_weights_TK, result.wants = x.grad, w.grad, "xw"
        return results


def in_phases(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Return a movement, and the same with a graph of its own for each start and finish."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as moves:
        whole = there_and_back(moves, case, rank, dropless=dropless)
        plan = moves.plan(case.routing(rank), dropless=dropless)
        calls = [PhaseCall() for _ in range(5)]
        inputs = case.x(rank).requires_grad_(), case.weights(rank).requires_grad_()
        pending = calls[0].run(lambda tokens: moves.start_dispatch(tokens[0], tokens[1], plan), inputs)
        batch, handle = calls[1].run(moves.finish_dispatch, pending)
        rows = calls[2].run(lambda arrived: (experts(arrived[0], case, rank), arrived[1]), (batch, handle))
        pending = calls[3].run(lambda computed: moves.start_combine(*computed), rows)
        out_TD = calls[4].run(moves.finish_combine, pending)
        grads: Sequence[Tensor | None] = [case.probe(rank)] if out_TD.requires_grad else []
        for call in reversed(calls):
            grads = call.backward(grads)
        result = seen(batch, out_TD)
        result.grad_x_TD, result.grad_weights_TK = grads
        result.wants = "xw"
        return whole, result


def handles(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> dict[str, tuple[Moved, Moved]]:
    """Return pairs that must be equal: the first movement, and movements along reused handles."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as moves:
        first = there_and_back(moves, case, rank, dropless=dropless)
        plan = moves.plan(case.routing(rank), dropless=dropless)
        batch, handle = moves.dispatch(case.x(rank), case.weights(rank), plan)
        rows_RD = experts(batch, case, rank).detach()
        once = seen(batch, moves.combine(rows_RD, handle))
        found = {"combine, the first time": (first, once)}
        found["combine with a handle used a second time"] = (once, seen(batch, moves.combine(rows_RD, handle)))
        there_and_back(moves, other_case(case), rank, dropless=dropless)
        found["combine after a later movement"] = (once, seen(batch, moves.combine(rows_RD, handle)))
        found["redispatch"] = (first, again(moves, case, rank, handle))
        found["redispatch with a handle used a second time"] = (first, again(moves, case, rank, handle))
        later = moves.plan(other_case(case).routing(rank), dropless=dropless)
        found["redispatch after a later plan"] = (first, again(moves, case, rank, handle))
        second, _ = moves.dispatch(case.x(rank), case.weights(rank), plan)
        found["dispatch with a plan used a second time"] = (once, seen(second, once.out_TD))
        batch2, handle2 = moves.redispatch(case.x(rank), case.weights(rank), handle)
        out_TD = moves.combine(experts(batch2, case, rank), handle2)
        found["combine with the handle of a redispatch"] = (once, seen(batch2, out_TD))
        assert later is not None
        return found


def same_places(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Return a dispatch, and the redispatch of the same along its handle."""
    with opened(group, case, assembly) as moves:
        plan = moves.plan(case.routing(rank), dropless=settled_case(assembly))
        batch, handle = moves.dispatch(case.x(rank), case.weights(rank), plan)
        again, _ = moves.redispatch(case.x(rank), case.weights(rank), handle)
        out_TD = moves.combine(experts(batch, case, rank), handle)
        return seen(batch, out_TD), seen(again, out_TD)


def redispatched(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Return a dispatch of twice the tokens and weights, and a redispatch of the same."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as moves:
        doubled: dict[str, Any] = {"x_TD": 2 * case.x(rank), "weights_TK": 2 * case.weights(rank)}
        wanted = there_and_back(moves, case, rank, dropless=dropless, **doubled)
        plan = moves.plan(case.routing(rank), dropless=dropless)
        _, handle = moves.dispatch(case.x(rank), case.weights(rank), plan)
        return wanted, again(moves, case, rank, handle, factor=2.0)


def side_by_side(
    group: Any, rank: int, case: DispatchCase, assembly: Assembly, second: DispatchCase, other: LayerCase
) -> list[tuple[Moved, Moved]]:
    """Return the movements of two dispatchers: each alone, and interleaved with the other."""
    alone, later = [], other.assemble()
    for one, parts in ((case, assembly), (second, later)):
        with opened(group, one, parts) as moves:
            alone.append(there_and_back(moves, one, rank, dropless=settled_case(parts)))
    with opened(group, case, assembly) as first, opened(group, second, later) as latter:
        pairs: list[tuple[Dispatcher, DispatchCase, Assembly]] = [(first, case, assembly), (latter, second, later)]
        plans = [moves.plan(one.routing(rank), dropless=settled_case(parts)) for moves, one, parts in pairs]
        inputs = [(one.x(rank).requires_grad_(), one.weights(rank).requires_grad_()) for _, one, _ in pairs]
        sent = [m.dispatch(x, w, plan) for (m, _, _), (x, w), plan in zip(pairs, inputs, plans, strict=True)]
        outs = [
            moves.combine(experts(batch, one, rank), handle)
            for (moves, one, _), (batch, handle) in zip(pairs, sent, strict=True)
        ]
        beside = [seen(batch, out) for (batch, _), out in zip(sent, outs, strict=True)]
        for result, out, (_, one, _), (x, w) in zip(beside, outs, pairs, inputs, strict=True):
            out.backward(one.probe(rank))
            result.grad_x_TD, result.grad_weights_TK, result.wants = x.grad, w.grad, "xw"
    return list(zip(alone, beside, strict=True))


def after_failures(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> dict[str, tuple[Moved, Moved]]:
    """Return a movement before and after others that were given up: after dispatch, after plan, before backward."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as moves:
        other = other_case(case)
        found = {}
        first = there_and_back(moves, case, rank, dropless=dropless)
        plan = moves.plan(other.routing(rank), dropless=dropless)
        moves.dispatch(other.x(rank), other.weights(rank), plan)
        found["after experts that failed"] = (first, there_and_back(moves, case, rank, dropless=dropless))
        moves.plan(other.routing(rank), dropless=dropless)
        found["after a plan that was not used"] = (first, there_and_back(moves, case, rank, dropless=dropless))
        with torch.no_grad():
            there_and_back(moves, other, rank, dropless=dropless, wants="")
        found["after a forward without gradients"] = (first, there_and_back(moves, case, rank, dropless=dropless))
        there_and_back(moves, other, rank, dropless=dropless, wants="x")
        found["after tokens alone wanted gradients"] = (first, there_and_back(moves, case, rank, dropless=dropless))
        return found


def reopened(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Return a movement, and one of a dispatcher built after the first was closed three times."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as moves:
        first = there_and_back(moves, case, rank, dropless=dropless)
        moves.close()
        moves.close()
    with opened(group, case, assembly) as moves:
        return first, there_and_back(moves, case, rank, dropless=dropless)


def odd_inputs(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> dict[str, tuple[Moved, Moved]]:
    """Return movements of contiguous tensors, and of equal views."""
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as moves:
        plain = there_and_back(moves, case, rank, dropless=dropless)
        x_TD, routing = case.x(rank), case.routing(rank)
        found = {}
        views: Mapping[str, Mapping[str, Any]] = {
            "tokens that are a transposed view": {"x_TD": x_TD.t().contiguous().t()},
            "tokens that are every other row of a tensor": {"x_TD": _every_other(x_TD)},
            "routing weights that are a view": {"weights_TK": routing.weights_TK.t().contiguous().t()},
            "expert ids that are a view": {"routing": _with_ids(routing, _strided(routing.expert_ids_TK))},
        }
        for name, inputs in views.items():
            found[name] = (plain, there_and_back(moves, case, rank, dropless=dropless, **inputs))
        outs = {}
        for name in ("contiguous", "view"):
            plan = moves.plan(routing, dropless=dropless)
            batch, handle = moves.dispatch(x_TD, routing.weights_TK, plan)
            rows_RD = experts(batch, case, rank).detach()
            rows_RD = (_strided(rows_RD) if name == "view" else rows_RD).requires_grad_()
            out_TD = moves.combine(rows_RD, handle)
            out_TD.sum().backward()  # the gradient of a sum is an expanded scalar
            outs[name] = seen(batch, out_TD)
            outs[name].grad_rows_RD = rows_RD.grad
        found["rows that are a view, and a gradient that is expanded"] = (outs["contiguous"], outs["view"])
        return found


def _strided(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def _every_other(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, 0)[::2]


def _with_ids(routing: Routing, ids_TK: Tensor) -> Routing:
    return Routing(expert_ids_TK=ids_TK, weights_TK=routing.weights_TK, capacity=routing.capacity)


def without_gradients(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved, list[str]]:
    """Return a movement with gradients, one without, and the latter's faults: saved tensors, required gradients."""
    dropless = settled_case(assembly)
    saved: list[str] = []
    with opened(group, case, assembly) as moves:
        wanted = there_and_back(moves, case, rank, dropless=dropless)

        def pack(tensor: Tensor) -> Tensor:
            saved.append(f"a tensor {tuple(tensor.shape)} is saved for backward")
            return tensor

        x_TD, weights_TK = case.x(rank).requires_grad_(), case.weights(rank).requires_grad_()
        with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            batch, handle = moves.dispatch(x_TD, weights_TK, moves.plan(case.routing(rank), dropless=dropless))
            out_TD = moves.combine(experts(batch, case, rank), handle)
        made = {"the rows": batch.rows_RD, "their weights": batch.row_weights_R, "the output": out_TD}
        saved += [f"{name} want gradients" for name, tensor in made.items() if tensor.requires_grad]
        return wanted, seen(batch, out_TD), saved


def known_counts(group: Any, rank: int, case: DispatchCase, assembly: Assembly, how: str) -> tuple[Moved, Moved]:
    """Return a movement planned by exchange, and one with counts on the host: given to plan, or in the routing."""
    dropless = settled_case(assembly)
    counts = [case.counts(source).tolist() for source in range(case.world)]
    with opened(group, case, assembly) as moves:
        exchanged = there_and_back(moves, case, rank, dropless=dropless)
        if how == "given":
            return exchanged, there_and_back(moves, case, rank, dropless=dropless, counts=counts)
        routing = case.routing(rank, counts_host=True)
        return exchanged, there_and_back(moves, case, rank, dropless=dropless, routing=routing)


def unasked_counts(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Moved, Moved]:
    """Return a movement with counts on the host, and one in a layer where no part asks for them there."""
    dropless = settled_case(assembly)
    layers = {n: evolve(layer, facts={**layer.facts, "counts": "device"}) for n, layer in assembly.layers.items()}
    with opened(group, case, assembly) as moves:
        asked = there_and_back(moves, case, rank, dropless=dropless)
    with opened(group, case, evolve(assembly, layers=layers)) as moves:
        routing = case.routing(rank, num_rows=True)
        return asked, there_and_back(moves, case, rank, dropless=dropless, routing=routing)


def permuted(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> tuple[Tensor, Tensor]:
    """Return the output of permuted tokens, and the permuted output."""
    dropless = settled_case(assembly)
    order = torch.randperm(case.tokens[rank], generator=torch.Generator().manual_seed(rank))
    with opened(group, case, assembly) as moves:
        straight = there_and_back(moves, case, rank, dropless=dropless, wants="")
        routing = case.routing(rank)
        routing = Routing(
            expert_ids_TK=routing.expert_ids_TK[order],
            weights_TK=routing.weights_TK[order],
            capacity=routing.capacity,
        )
        shuffled = there_and_back(
            moves, case, rank, dropless=dropless, wants="", routing=routing, x_TD=case.x(rank)[order]
        )
        return shuffled.out_TD, straight.out_TD[order]


def live_tensors(
    group: Any, rank: int, case: DispatchCase, assembly: Assembly, cases: Sequence[DispatchCase]
) -> list[int]:
    """Return the number of live tensors after each of four rounds of movements; rank 0 counts for all threads."""
    counts: list[int] = []
    dropless = settled_case(assembly)
    with opened(group, case, assembly) as moves:
        for _ in range(4):
            for one in cases:
                there_and_back(moves, one, rank, dropless=dropless)
            dist.barrier(group=group)
            if rank == 0:
                counts.append(_settled_tensors(counts[-1] if len(counts) > 1 else None))
            dist.barrier(group=group)
    return counts


def _settled_tensors(before: int | None) -> int:
    """Return the number of live tensors; for a second, wait for gloo's threads to release more than ``before``."""
    deadline = time.monotonic() + 1.0
    while True:
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        count = sum(number for kind, number in kinds.items() if issubclass(kind, Tensor))
        if before is None or count <= before or time.monotonic() > deadline:
            return count
        time.sleep(0.01)
