"""The HybridEP adapter, over a fake that moves rows through gloo, against the torch backend and the dense oracle."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moefw
from deep_ep_ranks import (
    in_flight,
    left_on_the_dispatcher,
    received,
    redispatched,
    refusal,
    refused,
    rows_outlive_the_layer,
    solved,
)
from moefw.plugins.dispatchers.hybridep.limits import Shape, limits
from moefw.testing.layer_case import LayerCase, assert_matches, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from pairwise import each_value, pairwise

BF16 = 4e-2
WORLDS = {
    "two ranks, unequal": ((5, 3), 2, 1, 2),
    "four ranks, one empty": ((4, 0, 7, 2), 4, 1, 4),
    "two nodes": ((4, 6, 7, 2), 4, 1, 2),
    "four nodes": ((4, 6, 0, 2), 4, 1, 1),
    "two groups": ((4, 1, 0, 3), 2, 1, 4),
    "experts in two parts": ((3, 5, 0, 2), 2, 2, 4),
    "one rank": ((7,), 1, 1, 1),
}
TOKENS = {"most tokens asked for": {}, "most tokens given": {"max_tokens": 9}}

pytestmark = pytest.mark.usefixtures("fake_deep_ep")


def case(world: str, *, capacity: float | None = None, on_overflow: str = "rerun", **more: Any) -> LayerCase:
    tokens, ep, etp, node = WORLDS[world]
    dispatch: dict[str, Any] = {"use": "hybridep", "backend": "torch"}
    if capacity:
        dispatch |= {"rank_capacity": capacity, "on_overflow": on_overflow}
    parts = {
        "dispatch": dispatch,
        "precision": {"use": "bf16"},
        "gemm": {"use": "loop"},
        "routing": {"use": "topk", "score": "sigmoid"},
        "parallel": {"experts": {"ep": ep, "etp": etp}, "ranks_per_node": node},
    }
    return LayerCase(**{"tokens": tokens, "dim": 16, "num_experts": 16, "parts": parts, **more})


@pytest.mark.parametrize(("world", "options"), each_value(WORLDS, TOKENS))
def test_outputs_and_gradients_equal_the_oracle(pool: RankPool, world: str, options: str) -> None:
    for seed, skew in enumerate(("even", "one", "starved")):
        layer_case = case(world, skew=skew, seed=seed, masked=seed == 1, shared=True, row_alignment=1 + 3 * seed)
        outcomes = pool.run(solved, layer_case.world, layer_case, TOKENS[options])
        assert_matches(outcomes, truth(layer_case, Rule(top_k=2)), rtol=BF16)


@pytest.mark.parametrize("options", TOKENS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_same_rows_arrive_as_over_the_torch_backend(pool: RankPool, world: str, options: str) -> None:
    layer_case = case(world, top_k=3, row_alignment=4)
    same(pool, layer_case, TOKENS[options], "rows", "weights", "counts", "offsets", "sizes")


@pytest.mark.parametrize(
    ("world", "capacity", "on_overflow"),
    pairwise(
        ["two ranks, unequal", "four ranks, one empty", "two nodes", "experts in two parts"],
        [0.3, 0.6, 4.0],
        ["drop", "rerun"],
    ),
)
def test_a_budget_leaves_out_the_same_rows_as_the_torch_backend(
    pool: RankPool, world: str, capacity: float, on_overflow: str
) -> None:
    layer_case = case(world, capacity=capacity, on_overflow=on_overflow, skew="one", row_alignment=4)
    names = ("rows", "weights", "counts", "offsets", "total")
    pairs = same(pool, layer_case, {}, *names)
    word = {"drop": "dropped_rows", "rerun": "overflow"}[on_overflow]
    for mine, wanted in pairs:
        assert mine["stats"].keys() == wanted["stats"].keys() == {word}
        lost, wanted_lost = mine["stats"][word], wanted["stats"][word]
        assert lost == (wanted_lost if on_overflow == "drop" else float(wanted_lost > 0))
        assert mine["sizes"] is None
    if capacity == 4.0:
        assert all(mine["stats"][word] == 0 for mine, _ in pairs)
    if capacity == 0.3:
        assert any(mine["stats"][word] > 0 for mine, _ in pairs)


@pytest.mark.parametrize("world", WORLDS)
def test_groups_are_padded_to_the_capacity_of_the_router(pool: RankPool, world: str) -> None:
    layer_case = case(world, row_alignment=4)
    routing = {**layer_case.parts["routing"], "capacity": {"factor": 1.0, "pad": True}}
    layer_case = LayerCase(**{**layer_case.__dict__, "parts": {**layer_case.parts, "routing": routing}})
    for mine, _ in same(pool, layer_case, {"max_tokens": 9}, "rows", "weights", "counts", "sizes"):
        assert len(set(mine["sizes"])) == 1


def same(pool: RankPool, layer_case: LayerCase, options: dict[str, Any], *names: str) -> list[tuple[dict, dict]]:
    ours = pool.run(received, layer_case.world, layer_case, options)
    theirs = pool.run(received, layer_case.world, layer_case, None)
    for mine, wanted in zip(ours, theirs):
        for name in names:
            equal = torch.equal if isinstance(mine[name], torch.Tensor) else lambda a, b: a == b
            assert equal(mine[name], wanted[name]), name
        assert torch.allclose(mine["out"], wanted["out"], rtol=2e-2)
    return list(zip(ours, theirs))


def test_a_budget_that_holds_gives_the_oracles_gradients(pool: RankPool) -> None:
    layer_case = case("two nodes", capacity=4.0, row_alignment=4)
    layer_case = LayerCase(**{**layer_case.__dict__, "parts": {**layer_case.parts, "gemm": {"use": "grouped"}}})
    assert_matches(pool.run(solved, 4, layer_case, {}), truth(layer_case, Rule(top_k=2)), rtol=BF16)


@pytest.mark.parametrize("capacity", [None, 4.0])
@pytest.mark.parametrize("world", ["two ranks, unequal", "four ranks, one empty", "experts in two parts"])
def test_redispatch_moves_other_values_along_the_handle(pool: RankPool, world: str, capacity: float | None) -> None:
    layer_case = case(world, capacity=capacity)
    etp = WORLDS[world][2]
    for again in pool.run(redispatched, layer_case.world, layer_case, {}):
        assert again.same_rows
        assert again.same_weights
        ((name, given),) = [call for call in again.calls if call[0].endswith("dispatch_with_permute")]
        assert name == "HybridEPBuffer.dispatch_with_permute"
        assert {"handle", "num_permuted_tokens"} <= set(given)
        assert not {"routing_map", "topk_idx"} & set(given)
        chosen = again.grads["ids"] >= 0
        assert torch.equal(again.grads["x"], 2.0 * etp * torch.ones_like(again.grads["x"]))
        assert torch.equal(again.grads["weights"], 3.0 * etp * chosen)


def test_two_micro_batches_in_flight_do_not_disturb_each_other(pool: RankPool) -> None:
    assert pool.run(in_flight, 4, case("two nodes"), {}) == [True] * 4


def test_nothing_stays_on_the_dispatcher(pool: RankPool) -> None:
    assert pool.run(left_on_the_dispatcher, 2, case("two ranks, unequal"), {}) == [[], []]


@pytest.mark.parametrize("capacity", [None, 4.0])
def test_no_row_outlives_its_movement(pool: RankPool, capacity: float | None) -> None:
    layer_case = case("two ranks, unequal", capacity=capacity)
    assert pool.run(rows_outlive_the_layer, 2, layer_case, {}) == [[False] * 3] * 2


def test_the_places_in_the_handle_are_those_of_the_real_library() -> None:
    from deep_ep.signatures import SNAPSHOT

    from moefw.plugins.dispatchers.hybridep.wire import COUNTS, OVERFLOW

    handle = SNAPSHOT["handles"]["HybridEPBuffer"]
    assert (handle[COUNTS], handle[OVERFLOW]) == ("tokens_per_expert", "overflow_flag")


@pytest.mark.parametrize(
    ("given", "max_tokens", "said"),
    [
        ({"model_dim": 4104}, None, "multiple of 16, not 4104"),
        ({"local_experts": 1024}, None, "at most 768 experts, not 1024"),
        ({"local_experts": 1, "ranks": 6, "node_ranks": 6}, None, "multiple of 4, not 6"),
        ({"ranks": 96, "node_ranks": 96}, None, "at most 72 ranks, not 96"),
        ({"ranks": 12, "node_ranks": 8}, None, "12 ranks do not divide into NVLink domains of 8"),
        ({"ranks": 16, "node_ranks": 8}, 32768, "at most 21824 tokens between nodes, not 32768"),
    ],
)
def test_what_the_library_cannot_do_is_said_with_the_limit(
    given: dict[str, int], max_tokens: int | None, said: str
) -> None:
    shape = Shape(**{"model_dim": 4096, "local_experts": 8, "ranks": 8, **given})
    (problem,) = limits(shape, max_tokens=max_tokens)
    assert said in problem.what
    assert "backend: torch" in problem.fix
    assert limits(Shape(model_dim=4096, local_experts=8, ranks=8, node_ranks=8)) == []


def test_a_library_without_hybridep_is_named_with_the_branch_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefw.plugins.dispatchers.hybridep.wire import library

    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=object))
    with pytest.raises(moefw.PlanError, match=r"no HybridEPBuffer.*No wheel carries it.*@hybrid-ep"):
        library()
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(moefw.PlanError, match=r"cannot import deep_ep.*@hybrid-ep"):
        library()


class Cluster(moefw.Machine):
    """A GPU machine with every package."""

    def has_package(self, name: str) -> bool:
        return True


def test_the_spec_is_refused_where_the_branch_is_not_built() -> None:
    said = refused(case("two ranks, unequal"), moefw.Machine(device="cpu"))
    assert "package hybrid_ep_cpp" in said
    assert "No wheel carries it. Build the branch" in said
    assert "device cuda" in said
    assert refused(case("two ranks, unequal"), Cluster(device="cuda")) == ""


def test_the_spec_is_refused_with_the_limit_of_the_library() -> None:
    cluster = Cluster(device="cuda")
    said = refused(case("two ranks, unequal", dim=24), cluster)
    assert said.startswith("PlanError")
    assert "layer case dispatch.backend" in said
    assert "multiple of 16, not 24" in said
    assert "multiple of 4, not 2" in refused(case("four nodes", num_experts=8), cluster)
    assert refused(case("four nodes"), cluster, max_tokens=64) == ""
    assert "Set rank_capacity and on_overflow: rerun" in refused(
        case("four nodes"), cluster, backend="torch", max_tokens=64
    )


def test_static_rows_without_counts_on_the_host_go_only_to_a_gemm_that_needs_none() -> None:
    layer_case, cluster = case("two nodes", capacity=2.0), Cluster(device="cuda")
    assert "counts on the host" in refused(layer_case, cluster)
    grouped = LayerCase(**{**layer_case.__dict__, "parts": {**layer_case.parts, "gemm": {"use": "grouped"}}})
    assert refused(grouped, cluster) == ""


def test_a_row_dtype_that_the_library_cannot_add_up_is_refused(pool: RankPool) -> None:
    layer_case = case("two ranks, unequal")
    layer_case = LayerCase(**{**layer_case.__dict__, "parts": {**layer_case.parts, "precision": {"use": "fp32"}}})
    for said in pool.run(refusal, 2, layer_case, {}):
        assert "bf16 rows; these are torch.float32" in said


def test_more_tokens_than_promised_are_refused(pool: RankPool) -> None:
    layer_case = case("two ranks, unequal", tokens=(5, 5))
    for said in pool.run(refusal, 2, layer_case, {"max_tokens": 4}):
        assert "sends 5 tokens; max_tokens is 4" in said
