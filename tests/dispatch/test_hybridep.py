"""The hierarchical dispatcher: nodes, static budgets of received rows, and their overflow."""

from __future__ import annotations

import pytest
import torch

from moefw.core.errors import MoefwError
from moefw.plugins.dispatchers.hybridep.limits import uneven_nodes
from moefw.testing.given_routing import RowBudget, over_budget
from moefw.testing.layer_case import LayerCase, assert_matches, received, solve, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool

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


@pytest.mark.parametrize("gemm", ["loop", "grouped"])
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("world", WORLDS)
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
