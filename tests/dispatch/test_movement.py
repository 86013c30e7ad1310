"""Movements overlap with the work between start and finish, in forward and backward, and are independent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import DISPATCHERS
from moefw.core.stages import Batch
from moefw.runtime.communication.movement import finish, start
from moefw.testing.layer_case import LayerCase, build_layer, routed
from moefw.testing.pool import RankPool

TWO_RANKS = {"parallel": {"experts": {"ep": 2}}}


class Logged:
    """A collective's work that logs when it is waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait(self) -> None:
        self.log.append(f"{self.name} awaited")


class Step(torch.autograd.Function):
    """A shared expert that logs when it runs."""

    @staticmethod
    def forward(ctx, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        log.append("shared expert forward")
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.log.append("shared expert backward")
        return grad * 2, None


def test_the_dual_starts_before_the_shared_experts_backward_and_is_awaited_after_it() -> None:
    log: list[str] = []

    def launch(name: str):
        def begin(sent: Sequence[Tensor]):
            log.append(f"{name} started")
            return [tensor.clone() for tensor in sent], [Logged(name, log)]

        return begin

    x = torch.ones(3, requires_grad=True)
    pending = start([x], forward=launch("dispatch"), dual=launch("dual"))
    shared = Step.apply(x, log)
    (moved,) = finish(pending)
    (moved + shared).sum().backward()
    assert log == [
        "dispatch started",
        "shared expert forward",
        "dispatch awaited",
        "dual started",
        "shared expert backward",
        "dual awaited",
    ]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


def overlap_log(case: LayerCase) -> list[str]:
    """Return the order of collectives and of the shared expert's backward in one layer's backward."""
    layer, shared = build_layer(case)
    log: list[str] = []
    for name in (
        "all_to_all_single",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_gather_single",
        "reduce_scatter_single",
    ):
        _log_collective(name, log)
    layer.shared_expert.down_proj.weight.register_hook(lambda grad: log.append("shared expert"))
    x_TD, probe_TD = case.draw(dist.get_rank())
    x_TD.requires_grad_()
    ids = torch.zeros(1, len(x_TD), dtype=torch.int64)
    out_TD, _ = layer(x_TD, Batch(ids_BS=ids, labels_BS=ids))
    log.clear()
    (out_TD * probe_TD).sum().backward()
    shared.close()
    return log


def _log_collective(name: str, log: list[str]) -> None:
    import moefw.runtime.communication.gather as gather

    inner = getattr(dist, name, None)
    if inner is None:
        return

    def logged(*arguments, **options):
        work = inner(*arguments, **options)
        if not options.get("async_op"):
            return work
        log.append("start")

        class Work:
            def wait(self) -> None:
                log.append("wait")
                work.wait()

        return Work()

    setattr(dist, name, logged)
    for alias in ("all_gather", "reduce_scatter"):
        if getattr(gather, alias) is inner:
            setattr(gather, alias, logged)


@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_the_dual_of_dispatch_runs_beside_the_shared_experts_backward(pool: RankPool, dispatch: str) -> None:
    case = LayerCase(tokens=(5, 3), shared=True, parts={"dispatch": DISPATCHERS[dispatch], **TWO_RANKS})
    try:
        for log in pool.run(overlap_log, 2, case):
            combine_waits = log.index("wait")
            dual_starts = log.index("start", combine_waits)
            last_wait = len(log) - 1 - log[::-1].index("wait")
            assert dual_starts < log.index("shared expert") < last_wait
    finally:
        pool.close()


def two_in_flight(case: LayerCase) -> dict[str, Tensor]:
    """Run two micro-batches in a row and interleaved, and return both results with the gradients of their tokens."""
    layer, shared = build_layer(case)
    moves = layer.dispatcher
    results = {}
    for order in ("in a row", "interleaved"):
        first, second = (_sent(case, layer, seed) for seed in (1, 2))
        if order == "in a row":
            outs = []
            for x_TD, routing in (first, second):
                batch, handle = moves.dispatch(x_TD, routing.weights_TK, moves.plan(routing))
                outs.append(moves.combine(layer.experts(batch), handle))
        else:
            plans = [moves.plan(routing) for _, routing in (first, second)]
            flying = [
                moves.start_dispatch(x, routing.weights_TK, plan)
                for (x, routing), plan in zip((first, second), plans, strict=True)
            ]
            arrived = [moves.finish_dispatch(pending) for pending in flying]
            back = [moves.start_combine(layer.experts(batch), handle) for batch, handle in arrived]
            outs = [moves.finish_combine(pending) for pending in back]
        sum((out.square().sum() for out in outs), torch.zeros(())).backward()
        for name, out, (x_TD, _) in zip("AB", outs, (first, second), strict=True):
            results |= {f"{order} {name}": out.detach(), f"{order} {name} grad": x_TD.grad}
    shared.close()
    return results


def _sent(case: LayerCase, layer, seed: int):
    drawn = LayerCase(**{**case.__dict__, "seed": seed})
    x_TD, _, routing = routed(drawn, layer)
    return x_TD.requires_grad_(), routing


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_two_micro_batches_in_flight_do_not_disturb_each_other(pool: RankPool, dispatch: str, world: int) -> None:
    parts = {"dispatch": DISPATCHERS[dispatch], "parallel": {"experts": {"ep": world}}}
    for results in pool.run(two_in_flight, world, LayerCase(tokens=(4, 0, 6, 3)[:world], parts=parts)):
        for name in ("A", "B", "A grad", "B grad"):
            assert torch.equal(results[f"in a row {name}"], results[f"interleaved {name}"])


def redispatched(case: LayerCase) -> tuple[bool, int]:
    """Return whether redispatch returns the rows of dispatch, and its number of metadata exchanges."""
    layer, shared = build_layer(case)
    moves = layer.dispatcher
    x_TD, _, routing = routed(case, layer)
    batch, handle = moves.dispatch(x_TD, routing.weights_TK, moves.plan(routing))
    calls: list[str] = []
    inner = type(moves).plan
    type(moves).plan = lambda *_, **__: calls.append("plan")
    again, _ = moves.redispatch(2 * x_TD, routing.weights_TK, handle)
    type(moves).plan = inner
    shared.close()
    return torch.equal(2 * batch.rows_RD, again.rows_RD), len(calls)


@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_redispatch_moves_other_values_along_the_same_way_without_planning(pool: RankPool, dispatch: str) -> None:
    case = LayerCase(tokens=(4, 3), parts={"dispatch": DISPATCHERS[dispatch], **TWO_RANKS})
    assert pool.run(redispatched, 2, case) == [(True, 0), (True, 0)]


def row_order(case: LayerCase) -> list[tuple[int, int, int]]:
    """Return (expert, source rank, token) of every received row, which the row's values encode."""
    layer, shared = build_layer(case)
    rank = dist.get_rank()
    x_TD, _, routing = routed(case, layer)
    named_TD = torch.zeros_like(x_TD)
    named_TD[:, 0], named_TD[:, 1] = rank, torch.arange(len(x_TD))
    batch, _ = layer.dispatcher.dispatch(named_TD, routing.weights_TK, layer.dispatcher.plan(routing))
    experts = torch.repeat_interleave(torch.arange(len(batch.counts_e)), batch.counts_e)
    shared.close()
    return [(int(e), int(row[0]), int(row[1])) for e, row in zip(experts, batch.rows_RD, strict=True)]


@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_rows_come_in_order_of_expert_source_rank_and_token(pool: RankPool, dispatch: str) -> None:
    parts = {"dispatch": DISPATCHERS[dispatch], "parallel": {"experts": {"ep": 2}}}
    for order in pool.run(row_order, 4, LayerCase(tokens=(5, 4, 0, 6), num_experts=8, parts=parts)):
        assert order == sorted(order)


def planned_with_counts(case: LayerCase) -> bool:
    """Return whether counts given on the host lead to the same rows as counts exchanged."""
    layer, shared = build_layer(case)
    x_TD, _, routing = routed(case, layer)
    counts = torch.zeros(dist.get_world_size(), case.num_experts, dtype=torch.int64)
    counts[dist.get_rank()] = torch.bincount(routing.expert_ids_TK.flatten(), minlength=case.num_experts)
    dist.all_reduce(counts)
    moves = layer.dispatcher
    exchanged, _ = moves.dispatch(x_TD, routing.weights_TK, moves.plan(routing))
    given, _ = moves.dispatch(x_TD, routing.weights_TK, moves.plan(routing, counts=counts.tolist()))
    shared.close()
    return torch.equal(exchanged.rows_RD, given.rows_RD) and exchanged.counts_host == given.counts_host


@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_counts_that_the_host_knows_replace_the_exchange(pool: RankPool, dispatch: str) -> None:
    case = LayerCase(tokens=(4, 3), parts={"dispatch": DISPATCHERS[dispatch], **TWO_RANKS})
    assert pool.run(planned_with_counts, 2, case) == [True, True]
