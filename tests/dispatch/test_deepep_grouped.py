"""Rows that DeepEP groups by expert (``grouped``), over the fake: the right rows in an order of its own, untouched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moefw
from deep_ep_cases import BF16, FP8, WORLDS, Cluster, case, packed, with_parts
from deep_ep_ranks import (
    in_flight,
    keyed,
    left_on_the_dispatcher,
    of_arrival,
    received,
    redispatched,
    refusal,
    refused,
    row_bytes,
    rows_outlive_the_layer,
    solved_in_any_order,
    torch_is_deterministic,
    trained,
)
from moefw.plugins.dispatchers.deepep.limits import Shape, grouped_limits
from moefw.plugins.dispatchers.deepep.probe import choose
from moefw.testing.layer_case import LayerCase, assert_matches, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL
from pairwise import each_value

pytestmark = pytest.mark.usefixtures("fake_deep_ep")

DIM = 256
GROUPED: dict[str, Any] = {"max_tokens": 16, "grouped": True}
UNGROUPED: dict[str, Any] = {"max_tokens": 16}
SHARED = ["two ranks, unequal", "four ranks, one empty", "experts in two parts"]


def grouped_case(world: str, **more: Any) -> LayerCase:
    return case(world, **{"dim": DIM, **more})


def groups(of_rank: dict[str, Any]) -> list[list[tuple[list[float], float]]]:
    """Return the rows of each expert with their weights, padding included, as they arrived."""
    rows = list(zip(of_rank["rows"].tolist(), of_rank["weights"].tolist(), strict=True))
    begins = [0, *of_rank["offsets"][:-1]]
    return [rows[begin:end] for begin, end in zip(begins, of_rank["offsets"], strict=True)]


@pytest.mark.parametrize("world", WORLDS)
def test_outputs_and_gradients_equal_the_oracle(pool: RankPool, world: str) -> None:
    for seed, skew in enumerate(("even", "one", "starved")):
        layer_case = grouped_case(
            world, skew=skew, seed=seed, masked=seed == 1, shared=True, row_alignment=1 + 3 * seed
        )
        outcomes = pool.run(solved_in_any_order, layer_case.world, layer_case, GROUPED)
        assert_matches(outcomes, truth(layer_case, Rule(top_k=2)), rtol=BF16)


PRECISIONS: dict[str, tuple[dict[str, Any], float, float]] = {
    "bf16": ({"use": "bf16"}, BF16, 1e-2),
    **{name: (recipe, 0.4, 0.5) for name, recipe in FP8.items()},
    "nvfp4": ({"use": "nvfp4", "backend": "emulate", "keep_bf16": []}, 0.8, 0.5),
}
"""Recipes, with their part in the tolerance and the floor as for combinations."""


@pytest.mark.parametrize(("precision", "gemm"), each_value(PRECISIONS, ["loop", "grouped"]))
def test_every_recipe_and_gemm_computes_on_rows_in_any_order(pool: RankPool, precision: str, gemm: str) -> None:
    layer_case = grouped_case("experts in two parts", shared=True, seed=2)
    recipe, rtol, floor = PRECISIONS[precision]
    layer_case = with_parts(layer_case, precision=recipe, gemm={"use": gemm})
    outcomes = pool.run(solved_in_any_order, layer_case.world, layer_case, GROUPED)
    assert_matches(outcomes, truth(layer_case, Rule(top_k=2)), rtol=rtol, floor=floor)


@pytest.mark.parametrize("region", ["dispatch", "experts", "router", "moe_act"])
def test_what_is_recomputed_meets_rows_in_their_places(pool: RankPool, region: str) -> None:
    layer_case = grouped_case("four ranks, one empty", skew="one", row_alignment=4)
    layer_case = with_parts(layer_case, memory=[{"use": "recompute", "regions": [region]}], gemm={"use": "grouped"})
    outcomes = pool.run(solved_in_any_order, 4, layer_case, GROUPED)
    assert_matches(outcomes, truth(layer_case, Rule(top_k=2)), rtol=BF16)


@pytest.mark.parametrize(
    ("regions", "parallel"),
    [
        (["attention", "router", "dispatch", "experts"], {"experts": {"ep": 2}}),
        (["mlp_norm", "dispatch"], {"pp": 2, "experts": {"ep": 2}}),
    ],
)
def test_a_model_trains_as_with_rows_in_order(pool: RankPool, regions: list[str], parallel: dict[str, Any]) -> None:
    """Weights are so large that experts matter."""
    tree = {**SMALL, "model": {**SMALL["model"], "dim": DIM, "init_std": 0.1}, "parallel": parallel}
    tree |= {"memory": [{"use": "recompute", "regions": regions}]}
    tree |= {"dispatch": {"use": "deepep", "backend": "torch"}, "precision": {"use": "bf16"}}
    world = 2 * parallel.get("pp", 1)
    ours, theirs = (pool.run(trained, world, tree, {**options, "max_tokens": 32}) for options in (GROUPED, UNGROUPED))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(("world", "alignment"), each_value(WORLDS, (1, 4, 6)))
def test_each_expert_gets_the_rows_that_it_gets_ungrouped(pool: RankPool, world: str, alignment: int) -> None:
    layer_case = grouped_case(world, num_experts=8, top_k=3, row_alignment=alignment)
    ours, theirs = (pool.run(received, layer_case.world, layer_case, options) for options in (GROUPED, UNGROUPED))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert [sorted(one) for one in groups(mine)] == [sorted(one) for one in groups(wanted)]
        for name in ("counts", "offsets", "sizes", "total"):
            assert mine[name] == wanted[name], name
        assert torch.allclose(mine["out"], wanted["out"], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("world", SHARED)
def test_rows_of_an_expert_come_in_no_order_that_anyone_promises(pool: RankPool, world: str) -> None:
    layer_case = grouped_case(world, num_experts=8, top_k=3, row_alignment=4)
    ours, theirs = (pool.run(received, layer_case.world, layer_case, options) for options in (GROUPED, UNGROUPED))
    assert [groups(of_rank) for of_rank in ours] != [groups(of_rank) for of_rank in theirs]


def test_what_pads_a_group_is_zero_behind_the_rows_of_the_expert(pool: RankPool) -> None:
    layer_case = grouped_case("four ranks, one empty", num_experts=8, top_k=3, row_alignment=8)
    for of_rank in pool.run(received, 4, layer_case, GROUPED):
        for rows, valid in zip(groups(of_rank), of_rank["counts"], strict=True):
            assert len(rows) % 8 == 0
            assert all(any(row) and weight for row, weight in rows[:valid])
            assert not any(any(row) or weight for row, weight in rows[valid:])


@pytest.mark.parametrize("alignment", [1, 4])
def test_rows_are_neither_sorted_nor_gathered_nor_added_up_here(pool: RankPool, alignment: int) -> None:
    layer_case = grouped_case("two ranks, unequal", row_alignment=alignment)
    ends = [] if alignment == 1 else ["aten::add.Tensor", "aten::floor_divide", "aten::mul.Tensor"]
    for arrival in pool.run(of_arrival, 2, layer_case, GROUPED):
        assert arrival.operators == ends
        assert arrival.same_rows
        assert arrival.combined_as_given
    for arrival in pool.run(of_arrival, 2, layer_case, UNGROUPED):
        assert not arrival.same_rows
        assert not arrival.combined_as_given


def test_each_dispatch_goes_to_an_elastic_buffer_without_an_order(pool: RankPool) -> None:
    layer_case = grouped_case("two ranks, unequal", row_alignment=4)
    for again in pool.run(redispatched, 2, layer_case, GROUPED):
        moves = [given for name, given in again.calls if name == "ElasticBuffer.dispatch"]
        assert moves
        assert all({"do_expand", "do_zero_padding", "handle"} <= set(given) for given in moves)
        assert not any(name.startswith("Buffer.") for name, _ in again.calls)


@pytest.mark.parametrize("world", SHARED)
def test_redispatch_moves_other_values_to_the_same_places(pool: RankPool, world: str) -> None:
    layer_case = grouped_case(world, num_experts=8, top_k=3, row_alignment=4)
    etp = WORLDS[world][2]
    for again in pool.run(redispatched, layer_case.world, layer_case, GROUPED):
        assert again.same_rows
        assert again.same_weights
        chosen = again.grads["ids"] >= 0
        assert torch.equal(again.grads["x"], (etp * chosen.sum(1, keepdim=True)).expand_as(again.grads["x"]).float())
        assert torch.equal(again.grads["weights"], 3.0 * etp * chosen)


@pytest.mark.parametrize("world", SHARED)
def test_each_row_gets_the_key_of_its_token(pool: RankPool, world: str) -> None:
    layer_case = grouped_case(world, num_experts=8, top_k=3, row_alignment=4)
    ours, theirs = (pool.run(keyed, layer_case.world, layer_case, options) for options in (GROUPED, UNGROUPED))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert len({key for _, key in wanted}) > 1
        assert sorted(mine) == sorted(wanted)


@pytest.mark.parametrize(("world", "precision"), each_value(WORLDS, FP8))
def test_packed_rows_arrive_as_they_do_ungrouped(pool: RankPool, world: str, precision: str) -> None:
    layer_case = packed(world, "Buffer", precision, dim=DIM)
    ours, theirs = (pool.run(received, layer_case.world, layer_case, options) for options in (GROUPED, UNGROUPED))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert [sorted(one) for one in groups(mine)] == [sorted(one) for one in groups(wanted)]
        assert mine["offsets"] == wanted["offsets"]


def test_packed_rows_are_half_as_wide_and_sums_and_gradients_are_not_packed(pool: RankPool) -> None:
    layer_case = packed("two ranks, unequal", "Buffer", "mxfp8", dim=DIM)
    whole, half = 2 * DIM, -(-(DIM + DIM // 32) // 32) * 32
    for moved in pool.run(row_bytes, 2, layer_case, GROUPED):
        assert moved == [("dispatch", half), ("combine", whole), ("dispatch", whole), ("combine", whole)]


def test_two_micro_batches_in_flight_do_not_disturb_each_other(pool: RankPool) -> None:
    assert pool.run(in_flight, 4, grouped_case("four ranks, one empty"), GROUPED, BF16) == [True] * 4


def test_nothing_stays_on_the_dispatcher_and_no_row_outlives_its_movement(pool: RankPool) -> None:
    layer_case = grouped_case("two ranks, unequal")
    assert pool.run(left_on_the_dispatcher, 2, layer_case, GROUPED) == [[], []]
    assert pool.run(rows_outlive_the_layer, 2, layer_case, GROUPED) == [[False] * 3] * 2


def shape(**more: int) -> Shape:
    return Shape(**{"model_dim": 4096, "top_k": 8, "num_experts": 256, "ranks": 8, **more})


def test_the_elastic_buffer_is_taken_where_the_other_would_be() -> None:
    import deep_ep

    assert choose(deep_ep, shape(), max_tokens=64) == "Buffer"
    assert choose(deep_ep, shape(), max_tokens=64, grouped=True) == "ElasticBuffer"
    with pytest.raises(moefw.PlanError, match=r"layer\. ElasticBuffer: the installed deep_ep lacks ElasticBuffer"):
        choose(SimpleNamespace(Buffer=deep_ep.Buffer), shape(), max_tokens=64, grouped=True)


def test_a_library_that_does_not_clear_padding_is_named_with_what_it_lacks() -> None:
    def dispatch(x: Any, expert_alignment: Any = None, do_expand: bool = False) -> None:
        """Return nothing, with an earlier signature."""

    older = SimpleNamespace(ElasticBuffer=SimpleNamespace(dispatch=dispatch, combine=None, destroy=None))
    assert choose(older, shape(model_dim=8192), max_tokens=64) == "ElasticBuffer"
    with pytest.raises(moefw.PlanError, match=r"lacks ElasticBuffer\.dispatch\(do_zero_padding=\)\."):
        choose(older, shape(), max_tokens=64, grouped=True)


def test_what_the_elastic_buffer_cannot_do_is_a_problem_though_the_other_could() -> None:
    assert grouped_limits(shape(), max_tokens=64) == grouped_limits(shape(ranks=1), max_tokens=None) == []
    (problem,) = grouped_limits(shape(model_dim=4112), max_tokens=None)
    assert "ElasticBuffer, which alone groups rows" in problem.what
    assert "multiple of 256, not 4112" in problem.what
    assert "set max_tokens" in problem.what
    assert (problem.fix, problem.where) == ("Use sizes within these limits, or leave grouped out.", "grouped")


def test_a_spec_is_refused_with_all_that_is_wrong_with_grouped() -> None:
    layer_case, machine = grouped_case("two ranks, unequal"), Cluster(device="cuda")
    assert refused(layer_case, machine, **GROUPED) == ""
    assert refused(packed("two ranks, unequal", "Buffer", "mxfp8", dim=DIM), machine, **GROUPED, wire="fp8") == ""
    said = refused(layer_case, machine, grouped=True)
    assert "layer case dispatch.grouped: DeepEP's ElasticBuffer" in said
    assert "set max_tokens" in said
    said = refused(layer_case, machine, **GROUPED, backend="torch")
    assert "layer case dispatch.grouped: grouped lets the library group rows, in any order" in said
    assert "layer case dispatch.max_tokens" in said
    assert "not 16" in refused(case("two ranks, unequal", dim=16), machine, **GROUPED)


def test_a_layer_that_is_recomputed_as_a_whole_is_refused() -> None:
    """Backward runs the nodes of the first forward, on what the second one saves: rows in another order."""
    layer_case, machine = grouped_case("two ranks, unequal"), Cluster(device="cuda")
    recomputed = with_parts(layer_case, memory=[{"use": "recompute", "regions": ["layer"]}])
    said = refused(recomputed, machine, **GROUPED)
    assert "layer case memory[0].regions: recompute needs rows in the same order each time" in said
    assert "deepep offers no. Name regions inside the layer: attention, router, dispatch, experts." in said
    assert refused(recomputed, machine, max_tokens=16) == ""
    assert refused(with_parts(layer_case, memory=[{"use": "offload", "regions": ["layer"]}]), machine, **GROUPED) == ""


@pytest.mark.parametrize("world", WORLDS)
def test_groups_are_padded_to_the_capacity_of_the_router(pool: RankPool, world: str) -> None:
    layer_case = grouped_case(world, row_alignment=4)
    routing = {**layer_case.parts["routing"], "capacity": {"factor": 1.0, "pad": True}}
    layer_case = with_parts(layer_case, routing=routing)
    assert refused(layer_case, Cluster(device="cuda"), **GROUPED) == ""
    ours, theirs = (pool.run(received, layer_case.world, layer_case, options) for options in (GROUPED, UNGROUPED))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert [sorted(one) for one in groups(mine)] == [sorted(one) for one in groups(wanted)]
        for name in ("counts", "offsets", "sizes"):
            assert mine[name] == wanted[name], name
        assert len(set(mine["sizes"])) == 1
    outcomes = pool.run(solved_in_any_order, layer_case.world, layer_case, GROUPED)
    assert_matches(outcomes, truth(layer_case, Rule(top_k=2, capacity=(1.0, "probs"))), rtol=BF16)


def test_a_capacity_that_only_drops_is_accepted(pool: RankPool) -> None:
    layer_case = grouped_case("four ranks, one empty")
    layer_case = with_parts(layer_case, routing={**layer_case.parts["routing"], "capacity": {"factor": 0.6}})
    assert refused(layer_case, Cluster(device="cuda"), **GROUPED) == ""
    outcomes = pool.run(solved_in_any_order, 4, layer_case, GROUPED)
    assert_matches(outcomes, truth(layer_case, Rule(top_k=2, capacity=(0.6, "probs"))), rtol=BF16)


def test_what_torch_promises_in_its_deterministic_mode_is_not_broken(pool: RankPool) -> None:
    for said in pool.run(refusal, 2, grouped_case("two ranks, unequal"), GROUPED, torch_is_deterministic):
        assert said.startswith("PlanError")
        assert "Leave grouped out" in said


def test_more_tokens_than_the_buffer_was_made_for_are_refused(pool: RankPool) -> None:
    layer_case = grouped_case("two ranks, unequal", tokens=(5, 5))
    for said in pool.run(refusal, 2, layer_case, {**GROUPED, "max_tokens": 4}):
        assert "sends 5 tokens" in said
        assert "max_tokens: 4" in said
