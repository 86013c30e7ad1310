"""Dispatchers with a capacity: dropped choices do not travel, and padded groups have the agreed size."""

from __future__ import annotations

import math

import pytest

from dispatchers import DISPATCHERS
from moefw.testing.layer_case import LayerCase, assert_matches, received, solve, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from pairwise import each_value, pairwise

FACTOR = 0.7
WORLDS = {
    "one rank": ((9,), {}),
    "unequal, one empty": ((9, 0, 4, 7), {"experts": {"ep": 4}, "ranks_per_node": 2}),
    "experts in halves": ((5, 8, 0, 3), {"experts": {"ep": 2, "etp": 2}, "ranks_per_node": 2}),
}


def limited(dispatch: str, world: str, *, drop: str, pad: bool, alignment: int = 1) -> LayerCase:
    tokens, parallel = WORLDS[world]
    routing = {"use": "topk", "score": "sigmoid", "capacity": {"factor": FACTOR, "drop": drop, "pad": pad}}
    parts = {"dispatch": DISPATCHERS[dispatch], "routing": routing, "parallel": parallel}
    return LayerCase(tokens=tokens, num_experts=8, parts=parts, row_alignment=alignment, skew="one", masked=True)


@pytest.mark.parametrize(
    ("dispatch", "world", "pad", "drop"), pairwise(DISPATCHERS, WORLDS, [False, True], ["probs", "position"])
)
def test_a_layer_that_drops_equals_the_oracle(pool: RankPool, dispatch: str, world: str, pad: bool, drop: str) -> None:
    case = limited(dispatch, world, drop=drop, pad=pad)
    wanted = truth(case, Rule(top_k=case.top_k, capacity=(FACTOR, drop)))
    assert wanted.tokens_per_expert.sum() > (wanted.expert_ids_TK >= 0).sum(), "the case is to drop"
    assert_matches(pool.run(solve, case.world, case), wanted, rtol=1e-5)


@pytest.mark.parametrize(("dispatch", "world", "alignment"), each_value(DISPATCHERS, WORLDS, [1, 4]))
def test_every_group_has_the_capacity_of_all_source_ranks(
    pool: RankPool, dispatch: str, world: str, alignment: int
) -> None:
    case = limited(dispatch, world, drop="probs", pad=True, alignment=alignment)
    etp = case.parts["parallel"].get("experts", {}).get("etp", 1)
    rows = sum(math.ceil(tokens * case.top_k / case.num_experts * FACTOR) for tokens in case.tokens)
    size = -(-rows // alignment) * alignment
    for batch in pool.run(received, case.world, case):
        assert batch.counts_host == (size,) * (case.num_experts * etp // case.world)
        assert len(batch.rows_RD) == sum(batch.counts_host)
