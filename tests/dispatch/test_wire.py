"""Every byte that a dispatcher sends is counted, and it sends no row twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from dispatchers import dispatch_assembly
from minima import Scheme, distinct, inside
from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared
from moefw.compose.registry import Registry
from moefw.core.stages import Routing
from moefw.testing.counting import Counting, Movement, Sent, Traffic
from moefw.testing.pool import RankPool
from moefw.testing.threads import thread_world
from moefw.testing.wire import count_bytes, open_dispatcher
from pairwise import each_value

OPTIONS: Mapping[str, Mapping[str, Any]] = {"deepep": {"backend": "torch"}, "hybridep": {"backend": "torch"}}
"""Options that a dispatcher needs."""


def registered() -> list[str]:
    registry = Registry()
    assert registry.load_all() == []
    return [part.name for part in registry.parts() if part.kind == "dispatcher"]


DISPATCHERS = registered()


@frozen(kw_only=True)
class Case:
    """A dispatcher over some ranks, and the number of tokens of each."""

    use: str
    tokens: tuple[int, ...]
    ranks_per_node: int
    etp: int = 1
    dropped: float = 0.0
    equal: bool = False
    capacity: int | None = None
    options: Mapping[str, Any] = {}
    num_experts: int = 16
    top_k: int = 3
    dim: int = 8

    def assembly(self) -> Assembly:
        return dispatch_assembly(
            self.use,
            ep=len(self.tokens) // self.etp,
            etp=self.etp,
            num_experts=self.num_experts,
            top_k=self.top_k,
            dim=self.dim,
            options={**OPTIONS.get(self.use, {}), **self.options},
        )

    def ids(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(0 if self.equal else rank)
        scheme = Scheme(num_experts=self.num_experts, top_k=self.top_k)
        ids_TK = scheme.draw(self.tokens[rank], generator=generator)
        return ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=generator) < self.dropped, -1)


def counted(group, rank: int, case: Case, assembly: Assembly) -> Traffic:
    shared = Shared()
    dispatcher = open_dispatcher(assembly, group, ranks_per_node=case.ranks_per_node, shared=shared)
    ids_TK = case.ids(rank)
    x_TD, weights_TK = torch.randn(len(ids_TK), case.dim), torch.rand(ids_TK.shape)
    counts = tuple(torch.bincount(ids_TK.flatten(), minlength=case.num_experts).tolist()) if case.equal else None
    answer = count_bytes(dispatcher, group, x_TD, weights_TK, ids_TK, capacity=case.capacity, counts_host=counts)
    dispatcher.close()
    shared.close()
    return answer


def all_counted(cases: Sequence[Case]) -> list[Traffic]:
    assemblies = by_etp(cases)
    return [counted(dist.group.WORLD, dist.get_rank(), case, assemblies[case.etp]) for case in cases]


def by_etp(cases: Sequence[Case]) -> dict[int, Assembly]:
    return {case.etp: case.assembly() for case in {case.etp: case for case in cases}.values()}


def cases(use: str, world: int) -> list[Case]:
    tokens = (5, 0, 3, 7, 2, 1, 4, 6)[:world]
    found = [Case(use=use, tokens=tokens, ranks_per_node=each, dropped=0.3) for each in {2, min(4, world), world}]
    found += [
        Case(use=use, tokens=(0,) * world, ranks_per_node=2),
        Case(use=use, tokens=tokens, ranks_per_node=2, dropped=1.0),
        Case(use=use, tokens=tokens, ranks_per_node=2, capacity=7),
        Case(use=use, tokens=(4,) * world, ranks_per_node=2, equal=True),
        Case(use=use, tokens=tokens, ranks_per_node=2, etp=2),
    ]
    return found


@pytest.mark.parametrize(("use", "world"), each_value(DISPATCHERS, [2, 4, 8]))
def test_the_same_bytes_leave_a_rank_on_gloo_and_on_threads(pool8: RankPool, use: str, world: int) -> None:
    tried = cases(use, world)
    by_rank = pool8.run(all_counted, world, tried)
    assemblies = by_etp(tried)
    for number, case in enumerate(tried):
        by_threads = thread_world(world, counted, case, assemblies[case.etp])
        for rank, traffic in enumerate(by_threads):
            assert traffic == by_rank[rank][number], case
            assert all(peers[rank] == Sent() for peers in traffic.sent.values())


def gradient_of_weights(group, rank: int, case: Case, assembly: Assembly) -> Tensor:
    shared = Shared()
    moves = open_dispatcher(assembly, group, ranks_per_node=case.ranks_per_node, shared=shared)
    ids_TK = case.ids(0).masked_fill(case.ids(0) >= case.num_experts // 2, -1)
    x_TD, weights_TK = torch.randn(len(ids_TK), case.dim), torch.ones(ids_TK.shape, requires_grad=True)
    batch, _ = moves.dispatch(x_TD, weights_TK, moves.plan(Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK)))
    if batch.row_weights_R.requires_grad:
        batch.row_weights_R.sum().backward()
    shared.close()
    sent_TK = (ids_TK >= 0).float()
    return sent_TK if weights_TK.grad is None else sent_TK - weights_TK.grad


@pytest.mark.parametrize("use", DISPATCHERS)
def test_ranks_that_got_no_rows_take_the_way_back_where_only_weights_want_gradients(use: str) -> None:
    case = Case(use=use, tokens=(5, 5), ranks_per_node=1)
    for wrong in thread_world(2, gradient_of_weights, case, case.assembly()):
        assert not wrong.any()


def redispatched(group, rank: int, case: Case, assembly: Assembly) -> tuple[Traffic, Traffic]:
    """Return the traffic of a dispatch and of its repetition."""
    shared = Shared()
    moves = open_dispatcher(assembly, group, ranks_per_node=case.ranks_per_node, shared=shared)
    ids_TK = case.ids(rank)
    x_TD, weights_TK = torch.randn(len(ids_TK), case.dim), torch.rand(ids_TK.shape)
    plan = moves.plan(Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK))
    seen = []
    handle = None
    for _ in range(2):
        with Counting(group, dims=(case.dim,)) as counting, counting.during("dispatch"):
            _, handle = moves.redispatch(x_TD, weights_TK, handle) if handle else moves.dispatch(x_TD, weights_TK, plan)
        seen.append(counting.traffic())
    shared.close()
    return seen[0], seen[1]


@pytest.mark.parametrize("use", DISPATCHERS)
def test_a_dispatch_repeated_sends_what_the_first_did_and_no_more(use: str) -> None:
    case = Case(use=use, tokens=(5, 0, 3, 7), ranks_per_node=2, dropped=0.3)
    for first, second in thread_world(4, redispatched, case, case.assembly()):
        assert first == second


# Counts against the minimum.


def test_the_fewest_rows_of_a_case_done_by_hand() -> None:
    """Four ranks on two nodes, two experts a rank."""
    everywhere, one_way = torch.tensor([[0, 2, 4, 7]]), torch.tensor([[4, 5, -1, -1]])
    nobody = torch.empty(0, 4, dtype=torch.int64)
    spread = [everywhere, nobody, nobody, nobody]
    assert distinct(spread, num_experts=8, num_units=4) == 3
    assert distinct(spread, num_experts=8, num_units=2) == 1
    assert inside(spread, num_experts=8, ranks_per_node=2) == 2
    assert inside(spread, num_experts=8, ranks_per_node=2, by_rail=False) == 2
    across = [nobody, one_way, nobody, nobody]
    assert distinct(across, num_experts=8, num_units=4) == distinct(across, num_experts=8, num_units=2) == 1
    assert inside(across, num_experts=8, ranks_per_node=2) == 1
    assert inside(across, num_experts=8, ranks_per_node=2, by_rail=False) == 0
    assert distinct([nobody, nobody, one_way, nobody], num_experts=8, num_units=4) == 0


@pytest.mark.parametrize(("groups", "limit"), [(1, 1), (4, 2), (4, 3), (2, 1)])
@pytest.mark.parametrize("num_units", [2, 4, 8])
def test_the_closed_form_is_the_mean_over_all_routings(groups: int, limit: int, num_units: int) -> None:
    num_experts, top_k = 8, 2
    scheme = Scheme(num_experts=num_experts, top_k=top_k, groups=groups, limit=limit)
    touched = [
        len({expert // (num_experts // num_units) for expert in chosen})
        for opened in combinations(range(groups), limit)
        for chosen in combinations([e for e in range(num_experts) if e * groups // num_experts in opened], top_k)
    ]
    assert scheme.touched(num_units) == pytest.approx(sum(touched) / len(touched))


def test_the_closed_forms_are_those_published() -> None:
    uniform = Scheme(num_experts=256, top_k=8)
    limited = Scheme(num_experts=256, top_k=8, groups=8, limit=4)
    assert [round(uniform.touched(units), 2) for units in (2, 4, 16, 32, 64)] == [1.99, 3.61, 6.52, 7.27, 7.68]
    assert [round(limited.touched(units), 2) for units in (8, 64)] == [3.63, 7.36]


RANKS, TOKENS, DIM = 16, 4, 7168


def totals(group, rank: int, use: str, assembly: Assembly, ids: Sequence[Tensor], each: int) -> dict[str, Any]:
    shared = Shared()
    dispatcher = open_dispatcher(assembly, group, ranks_per_node=each, shared=shared)
    x_TD = torch.zeros(len(ids[rank]), DIM, dtype=torch.bfloat16)
    return count_bytes(dispatcher, group, x_TD, torch.ones(ids[rank].shape), ids[rank]).by_link(each)


@pytest.mark.parametrize("each", [4, 8])
@pytest.mark.parametrize("limit", [1, 4], ids=["uniform", "group-limited"])
@pytest.mark.parametrize("use", ["allgather", "alltoall", "deepep", "hybridep"])
def test_no_row_travels_twice(use: str, limit: int, each: int) -> None:
    scheme = Scheme(num_experts=256, top_k=8, groups=8 if limit > 1 else 1, limit=limit)
    generator = torch.Generator().manual_seed(0)
    ids = [scheme.draw(TOKENS, generator=generator) for _ in range(RANKS)]
    assembly = dispatch_assembly(use, ep=RANKS, num_experts=256, top_k=8, dim=DIM, options=OPTIONS.get(use))
    by_rank = thread_world(RANKS, totals, use, assembly, ids, each)
    to_ranks = distinct(ids, num_experts=256, num_units=RANKS)
    to_nodes = distinct(ids, num_experts=256, num_units=RANKS // each)
    owners = [(rank, expert // 16) for rank in range(RANKS) for expert in ids[rank].flatten().tolist()]
    copies = {
        "allgather": TOKENS * RANKS * (RANKS - 1),
        "alltoall": sum(home != owner for home, owner in owners),
        "deepep": to_ranks,
        "hybridep": to_nodes + inside(ids, num_experts=256, ranks_per_node=each),
    }
    sent = {
        (movement, link): sum((links[movement][link] for links in by_rank), Sent())
        for movement, link in product(get_args(Movement), ("node", "network"))
    }
    for movement in get_args(Movement)[1:]:
        rows = {link: sent[movement, link].payload / (2 * DIM) for link in ("node", "network")}
        assert sum(rows.values()) == copies[use]
        if use == "hybridep":
            assert rows["network"] == to_nodes
    payload, metadata = (sum(getattr(bytes_, kind) for bytes_ in sent.values()) for kind in ("payload", "metadata"))
    assert 0 < metadata <= 0.03 * payload
    for movement in ("combine", "combine_backward"):
        assert sent[movement, "node"].metadata == sent[movement, "network"].metadata == 0
