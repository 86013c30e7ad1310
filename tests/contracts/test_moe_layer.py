"""Every combination of plugins computes what the dense oracle computes, gradients included."""

from __future__ import annotations

import itertools

import pytest

from dispatchers import DISPATCHERS
from moefw.testing.layer_case import LayerCase, assert_matches, solve, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from pairwise import each_value, pairwise

GEMMS = ("loop", "grouped")
PRECISIONS = {"fp32": 5e-5, "bf16": 4e-2}
MEMORY = {
    "none": [],
    "keep": [{"use": "keep", "regions": ["router", "experts"]}],
    "recompute": [{"use": "recompute", "regions": ["router", "experts", "shared_experts"]}],
    "recompute_act": [{"use": "recompute", "regions": ["moe_act"]}],
    "offload": [{"use": "offload", "regions": ["router", "experts", "shared_experts"], "min_bytes": 0}],
}
ROUTINGS = {
    "sigmoid": ({"score": "sigmoid"}, {}),
    "sigmoid_raw": ({"score": "sigmoid", "renormalise": False, "scale": 2.5}, {"renormalise": False, "scale": 2.5}),
    "softmax": ({"score": "softmax"}, {"score": "softmax"}),
    "aux": (
        {"score": "softmax", "balance": [{"kind": "aux_loss", "coeff": 0.1}, {"kind": "z_loss", "coeff": 0.01}]},
        {"score": "softmax", "aux_coeff": 0.1, "z_coeff": 0.01},
    ),
    "aux_sigmoid": (
        {"score": "sigmoid", "balance": [{"kind": "expert_bias"}, {"kind": "aux_loss", "coeff": 0.1}]},
        {"aux_coeff": 0.1},
    ),
}
WORLDS = {
    "one rank": ((7,), {}),
    "two ranks, unequal": ((5, 3), {"experts": {"ep": 2}}),
    "two ranks, experts whole": ((5, 3), {}),
    "two ranks, experts in halves": ((5, 3), {"experts": {"etp": 2}}),
    "four ranks, one empty": ((4, 0, 7, 2), {"experts": {"ep": 4}, "ranks_per_node": 2}),
    "four ranks, two groups": ((4, 1, 0, 3), {"experts": {"ep": 2}}),
    "four ranks, experts in halves": ((4, 1, 0, 3), {"experts": {"ep": 2, "etp": 2}, "ranks_per_node": 2}),
    "all ranks empty": ((0, 0), {"experts": {"ep": 2}}),
}
SKEWS = ("even", "one", "starved")


def layer_case(
    dispatch: str, gemm: str, precision: str, memory: str, routing: str, world: str, skew: str, **more
) -> LayerCase:
    tokens, parallel = WORLDS[world]
    parts = {
        "dispatch": DISPATCHERS[dispatch],
        "gemm": {"use": gemm},
        "precision": {"use": precision},
        "memory": MEMORY[memory],
        "routing": {"use": "topk", **ROUTINGS[routing][0]},
        "parallel": parallel,
    }
    return LayerCase(tokens=tokens, skew=skew, parts=parts, **more)


def check(pool: RankPool, case: LayerCase, routing: str, precision: str) -> None:
    rule = Rule(top_k=case.top_k, **ROUTINGS[routing][1])
    assert_matches(pool.run(solve, case.world, case), truth(case, rule), rtol=PRECISIONS[precision])


COMBINATIONS = list(itertools.product(DISPATCHERS, GEMMS, PRECISIONS, MEMORY))


@pytest.mark.parametrize(("dispatch", "gemm", "precision", "memory"), pairwise(DISPATCHERS, GEMMS, PRECISIONS, MEMORY))
def test_every_combination_equals_the_oracle(
    pool: RankPool, dispatch: str, gemm: str, precision: str, memory: str
) -> None:
    """Each runs on two worlds, routings and skews; the next combination takes others."""
    number = COMBINATIONS.index((dispatch, gemm, precision, memory))
    for seed in (number, number + 3):
        routing, world, skew = (list(one)[seed % len(one)] for one in (ROUTINGS, WORLDS, SKEWS))
        case = layer_case(
            dispatch, gemm, precision, memory, routing, world, skew, seed=seed, masked=seed % 2 == 1, shared=True
        )
        check(pool, case, routing, precision)


@pytest.mark.parametrize(("dispatch", "world", "routing"), pairwise(DISPATCHERS, WORLDS, ROUTINGS))
def test_every_routing_equals_the_oracle_on_every_world(
    pool: RankPool, dispatch: str, world: str, routing: str
) -> None:
    skew = SKEWS[(list(WORLDS).index(world) + list(ROUTINGS).index(routing)) % len(SKEWS)]
    case = layer_case(dispatch, "grouped", "fp32", "none", routing, world, skew, masked=True)
    check(pool, case, routing, "fp32")


EIGHT = {
    "nodes of two": {"experts": {"ep": 8}, "ranks_per_node": 2},
    "nodes of four": {"experts": {"ep": 8}, "ranks_per_node": 4},
    "experts in halves, nodes of two": {"experts": {"ep": 4, "etp": 2}, "ranks_per_node": 2},
    "experts in halves, nodes of four": {"experts": {"ep": 4, "etp": 2}, "ranks_per_node": 4},
    "two groups of one node each": {"experts": {"ep": 4}, "ranks_per_node": 4},
}


@pytest.mark.parametrize(("layout", "dispatch"), each_value(EIGHT, DISPATCHERS))
def test_every_dispatcher_equals_the_oracle_on_eight_ranks(pool8: RankPool, layout: str, dispatch: str) -> None:
    tokens = (3, 0, 5, 2, 4, 1, 0, 6)
    settings = zip(itertools.cycle(PRECISIONS), ("sigmoid", "aux", "softmax"), SKEWS)
    for seed, (precision, routing, skew) in enumerate(settings):
        parts = {
            "dispatch": DISPATCHERS[dispatch],
            "precision": {"use": precision},
            "routing": {"use": "topk", **ROUTINGS[routing][0]},
            "parallel": EIGHT[layout],
        }
        case = LayerCase(tokens=tokens, num_experts=16, top_k=3, skew=skew, seed=seed, masked=seed == 1, parts=parts)
        check(pool8, case, routing, precision)


def test_an_expert_without_tokens_gets_a_zero_gradient(pool: RankPool) -> None:
    case = layer_case("alltoall", "grouped", "fp32", "none", "sigmoid", "two ranks, unequal", "one", top_k=1)
    case = LayerCase(
        **{
            **case.__dict__,
            "parts": {**case.parts, "routing": {"use": "topk", "score": "sigmoid", "renormalise": False}},
        }
    )
    outcomes = pool.run(solve, 2, case)
    assert outcomes[0].tokens_per_expert.tolist() == [5.0, 0.0, 0.0, 0.0]
    assert outcomes[1].grads["experts.3.down_proj.weight"].abs().max() == 0
    assert outcomes[0].grads["experts.0.down_proj.weight"].abs().max() > 0


@pytest.mark.parametrize(("dispatch", "alignment"), each_value(DISPATCHERS, [4, 16]))
def test_groups_are_padded_with_zero_rows_to_the_alignment_that_was_negotiated(
    pool: RankPool, dispatch: str, alignment: int
) -> None:
    for world in ("one rank", "four ranks, one empty", "two ranks, experts whole"):
        case = layer_case(dispatch, "loop", "fp32", "none", "sigmoid", world, "even", row_alignment=alignment)
        check(pool, case, "sigmoid", "fp32")
        for sizes, padding in pool.run(padded_groups, case.world, case):
            assert all(size % alignment == 0 for size in sizes)
            assert padding == 0.0


def padded_groups(case: LayerCase) -> tuple[tuple[int, ...], float]:
    from moefw.testing.layer_case import received

    batch = received(case)
    assert batch.counts_host is not None
    start, worst = 0, 0.0
    for size, count in zip(batch.counts_host, batch.counts_e.tolist(), strict=True):
        worst = max(worst, batch.rows_RD[start + count : start + size].abs().sum().item())
        worst = max(worst, batch.row_weights_R[start + count : start + size].abs().sum().item())
        start += size
    assert batch.offsets_e[-1] == start == len(batch.rows_RD)
    return batch.counts_host, worst
