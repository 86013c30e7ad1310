"""The hierarchical dispatcher: nodes, static budgets of received rows, and their overflow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moefw.core.errors import MoefwError
from moefw.plugins.dispatchers.hybridep.limits import uneven_nodes
from moefw.testing.given_routing import RowBudget, over_budget
from moefw.testing.host_waits import HostWaits, available
from moefw.testing.layer_case import LayerCase, assert_matches, build_layer, received, solve, this_rank, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from operators_seen import Operators
from pairwise import pairwise

CAPACITY = 0.6


def budgeted(
    tokens: tuple[int, ...], on_overflow: str, *, parallel: dict[str, object], alignment: int, gemm: str = "grouped"
) -> LayerCase:
    dispatch = {"use": "hybridep", "backend": "torch", "rank_capacity": CAPACITY, "on_overflow": on_overflow}
    parts = {"dispatch": dispatch, "gemm": {"use": gemm}, "parallel": parallel, "routing": SIGMOID}
    return LayerCase(tokens=tokens, parts=parts, row_alignment=alignment, skew="one")


SIGMOID = {"use": "topk", "score": "sigmoid"}
WORLDS = {
    "one rank": ((9,), {}),
    "two nodes of one": ((6, 4), {"experts": {"ep": 2}, "ranks_per_node": 1}),
    "two nodes of two": ((6, 0, 5, 3), {"experts": {"ep": 4}, "ranks_per_node": 2}),
    "experts in halves": ((6, 1, 5, 3), {"experts": {"ep": 2, "etp": 2}, "ranks_per_node": 2}),
}


@pytest.mark.parametrize(("world", "alignment", "gemm"), pairwise(WORLDS, [1, 4], ["loop", "grouped"]))
def test_rows_beyond_the_budget_are_dropped_as_the_oracle_drops_them(
    pool: RankPool, world: str, alignment: int, gemm: str
) -> None:
    tokens, parallel = WORLDS[world]
    case = budgeted(tokens, "drop", parallel=parallel, alignment=alignment, gemm=gemm)
    rule = Rule(top_k=case.top_k)
    ids = truth(case, rule).expert_ids_TK.split(list(tokens))
    ep = parallel.get("experts", {}).get("ep", 1)
    budget = RowBudget(CAPACITY)
    dropped = over_budget(ids, num_experts=case.num_experts, ep=ep, budget=budget, row_alignment=alignment)
    assert any(mask.any() for mask in dropped), "the case is to overflow"
    assert_matches(pool.run(solve, case.world, case), truth(case, rule, dropped_TK=torch.cat(dropped)), rtol=1e-5)


@pytest.mark.parametrize("alignment", [1, 4])
def test_every_rank_gets_exactly_the_budget_and_says_how_many_rows_it_left_out(pool: RankPool, alignment: int) -> None:
    tokens, parallel = WORLDS["two nodes of two"]
    batches = pool.run(received, 4, budgeted(tokens, "rerun", parallel=parallel, alignment=alignment))
    rows = -(-int(CAPACITY * 12 + 0.999) // alignment) * alignment
    assert [len(batch.rows_RD) for batch in batches] == [rows] * 4
    assert sum(batch.stats["overflow"].item() for batch in batches) > 0
    for batch in batches:
        assert batch.offsets_e[-1] <= rows
        assert all(end % alignment == 0 for end in batch.offsets_e.tolist())


ENOUGH = 16.0


def static(world: str, rank_capacity: float, *, max_tokens: int = 7, gemm: str = "grouped", **more: Any) -> LayerCase:
    """Case with a budget whose sizes follow from ``max_tokens``."""
    tokens, parallel = WORLDS[world]
    dispatch = {"use": "hybridep", "backend": "torch", "max_tokens": max_tokens, "on_overflow": "rerun"}
    dispatch["rank_capacity"] = rank_capacity
    parts = {"dispatch": dispatch, "gemm": {"use": gemm}, "parallel": parallel, "routing": SIGMOID}
    case = LayerCase(**{"tokens": tokens, "parts": parts, "skew": "one", **more})
    return replace(case, tokens=tuple(min(each, max_tokens) for each in case.tokens))


@pytest.mark.parametrize(("world", "alignment", "gemm"), pairwise(WORLDS, [1, 4], ["loop", "grouped"]))
def test_static_hops_with_room_for_all_rows_change_nothing(
    pool: RankPool, world: str, alignment: int, gemm: str
) -> None:
    case = static(world, ENOUGH, row_alignment=alignment, masked=True, gemm=gemm)
    assert_matches(pool.run(solve, case.world, case), truth(case, Rule(top_k=case.top_k)), rtol=1e-5)


@pytest.mark.parametrize(("world", "skew", "capacity"), pairwise(WORLDS, ["even", "one"], [0.6, 1.0, 1.4]))
def test_static_hops_say_how_many_rows_found_no_room_in_a_hop_or_at_the_rank(
    pool: RankPool, world: str, skew: str, capacity: float
) -> None:
    case = static(world, capacity, skew=skew, seed=3)
    batches = pool.run(received, case.world, case)
    choices = truth(case, Rule(top_k=case.top_k)).expert_ids_TK.numel()
    due = choices * case.parts["parallel"].get("experts", {}).get("etp", 1)
    arrived = sum(int(batch.counts_e.sum()) for batch in batches)
    assert arrived + sum(batch.stats["overflow"].item() for batch in batches) == due
    assert arrived < due or capacity >= 1, "the case is to overflow"


def operators(layer_case: LayerCase) -> tuple[list[str], float]:
    """Return the operators of a layer, forward and backward, and the rows that found no room."""
    layer, shared = build_layer(layer_case)
    with HostWaits() as waits:
        waits.move(layer)
        x_TD, probe_TD = waits.on_device(layer_case.draw(this_rank()))
        x_TD.requires_grad_()
        with Operators() as noted:
            out_TD, stats = layer(x_TD, waits.on_device(layer_case.batch(this_rank())))
            (out_TD * probe_TD).sum(dtype=torch.float32).backward()
        assert [*waits.reads, *waits.uploads] == []
        overflow = waits.on_host(dict(stats.stats))["overflow"].item()
    shared.close()
    return noted.seen, overflow


@pytest.mark.skipif(not available(), reason="this torch has no devices that are written in Python")
@pytest.mark.parametrize(
    ("world", "capacity"), [("two nodes of one", 1.3), ("two nodes of two", 1.7), ("experts in halves", 1.3)]
)
def test_a_whole_layer_of_static_hops_runs_the_same_operators_whatever_the_routing(
    own_pool: RankPool, world: str, capacity: float
) -> None:
    more: dict[str, Any] = {"tokens": (16,) * len(WORLDS[world][0]), "dim": 16, "num_experts": 8, "row_alignment": 4}
    runs, overflows = [], []
    for skew, seed in (("even", 0), ("starved", 1), ("one", 2), ("one", 3)):
        case = static(world, capacity, max_tokens=16, skew=skew, seed=seed, **more)
        case = replace(case, parts={**case.parts, "precision": {"use": "bf16"}})
        seen, overflow = zip(*own_pool.run(operators, case.world, case), strict=True)
        runs.append(seen)
        overflows.append(sum(overflow))
    assert any(overflows), "rows find no room"
    assert not all(overflows)
    assert all(len(seen) > 50 for seen in runs[0])
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("nodes", [[0], [0, 0, 1, 1], [3, 4], [0, 0, 0]])
def test_groups_that_fill_nodes_evenly_are_taken(nodes: list[int]) -> None:
    assert uneven_nodes(nodes) is None


@pytest.mark.parametrize("nodes", [[0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 2]])
def test_groups_that_lie_unevenly_on_nodes_are_refused(nodes: list[int]) -> None:
    problem = uneven_nodes(nodes)
    assert problem is not None
    assert str(nodes) in problem.what


def refusal(dispatch: dict[str, object], **parallel: object) -> str:
    with pytest.raises(MoefwError) as caught:
        LayerCase(tokens=(4, 4, 4), parts={"dispatch": dispatch, "parallel": parallel}, num_experts=6).assemble()
    return str(caught.value)


def test_a_layout_whose_groups_do_not_fill_nodes_is_refused_before_anything_starts() -> None:
    message = refusal({"use": "hybridep", "backend": "torch"}, experts={"ep": 3}, ranks_per_node=2)
    assert "[0, 0, 1]" in message
    assert "ranks_per_node" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank_capacity": 1.5}, "on_overflow"),
        ({"on_overflow": "drop"}, "no budget"),
        ({"rank_capacity": 0.0, "on_overflow": "drop"}, "rank_capacity"),
        ({"rank_capacity": 1.0, "on_overflow": "ignore"}, "rerun"),
        ({"max_tokens": 8}, "Set rank_capacity and on_overflow: rerun"),
        ({"max_tokens": 8, "rank_capacity": 1.0, "on_overflow": "drop"}, "only a second run without it is right"),
    ],
)
def test_a_budget_and_what_happens_beyond_it_belong_together(options: dict[str, object], words: str) -> None:
    assert words in refusal({"use": "hybridep", "backend": "torch", **options})


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_a_backend_that_does_not_exist_is_refused(name: str) -> None:
    message = refusal({"use": name, "backend": "nccl"})
    assert "library" in message
    assert "torch" in message


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_the_backend_is_named_by_the_spec(name: str) -> None:
    message = refusal({"use": name})
    assert "'backend' is missing" in message
    assert "library" in message
    assert "torch" in message
