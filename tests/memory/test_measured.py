"""Measured memory of a rank's step: against hand-counted bytes, with and without values, alone and among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from fake_steps import fake_assembly
from memory_cases import qwen3_235b
from moefw.core.errors import ContractError
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL
from moefw.training.measured import Measured, measure, measure_here
from pairwise import deep

TOKENS, DIM, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, EXPERT_DIM = 32, 32, 4, 2, 8, 8, 2, 16
"""Sizes of ``SMALL``, whose micro-batches are two sequences of 16 tokens."""
FP32 = INT32 = 4
INT64 = 8
GIB = 2**30


TREE = {**SMALL, "model": {**SMALL["model"], "num_layers": 2}}
"""A dense layer and an MoE layer."""


def spec(**sections: Any) -> dict[str, Any]:
    return {**TREE, **sections}


def with_values(tree: Mapping[str, Any], **options: Any) -> Measured:
    return measure_here(fake_assembly(dict(tree), 1), **options)


def without_values(tree: Mapping[str, Any], **options: Any) -> Measured:
    return measure(fake_assembly(dict(tree), 1), **options)


@cache
def plain() -> Measured:
    return without_values(spec())


def of_experts(measured: Measured, layer: int) -> int:
    return sum(nbytes for region, nbytes in measured.by_region(layer).items() if region.startswith("expert"))


def test_a_norm_saves_its_input_and_a_scale_for_each_token() -> None:
    assert plain().by_region(1)["attn_norm"] == TOKENS * (DIM * FP32 + FP32)


def test_grouped_experts_save_rows_pre_activation_and_weights() -> None:
    rows = TOKENS * TOP_K
    x, h, weights, ends = rows * DIM * FP32, rows * 2 * EXPERT_DIM * FP32, rows * FP32, EXPERTS * INT32
    assert of_experts(plain(), 1) == x + h + weights + ends


def test_latent_attention_saves_queries_keys_values_and_output_at_their_true_widths() -> None:
    latent = {"use": "mla", "num_heads": HEADS, "q_rank": 16, "kv_rank": 12, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}
    core = without_values(spec(attention=latent)).by_region(1)["core_attn"]
    assert core == TOKENS * HEADS * (2 * (8 + 4) + 2 * 6 + 1) * FP32


def test_adamw_holds_two_moments_and_a_step_for_each_parameter() -> None:
    held = plain().held
    parameters = held["parameters"]
    assert held["gradients"] == parameters
    assert 2 * parameters < held["optimizer"] < 2 * parameters + 1000
    assert held["buffers"] == EXPERTS * FP32


def test_what_is_held_at_the_peak_adds_up_to_it() -> None:
    measured = plain()
    assert sum(measured.peak_held.values()) == measured.peak
    assert measured.peak > sum(measured.held.values())


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"dispatch": {"use": "allgather"}, "gemm": {"use": "loop"}, "precision": {"use": "bf16"}},
        {"dispatch": {"use": "deepep", "backend": "torch"}, "routing": {"use": "forced"}},
        {"dispatch": {"use": "hybridep", "backend": "torch"}, "routing": {"use": "sinkhorn", "max_rounds": 1}},
        {"memory": [{"use": "recompute", "regions": ["core_attn"]}]},
    ],
    ids=["plain", "allgather-loop-bf16", "deepep-forced", "hybridep-sinkhorn", "recompute"],
)
def test_without_values_a_step_holds_what_it_holds_with_them(sections: dict[str, Any]) -> None:
    truth, found = with_values(spec(**sections)), without_values(spec(**sections))
    assert found.held == truth.held
    assert found.saved == truth.saved
    assert found.peak == truth.peak
    assert found.peak_place == truth.peak_place


def test_a_second_micro_batch_finds_the_gradients_of_the_first() -> None:
    one, three = (without_values(spec(), micro_batches=count) for count in (1, 3))
    assert plain().micro_batches == 2
    assert one.saved == plain().saved
    ids_and_labels = 2 * TOKENS * INT64
    assert one.peak + ids_and_labels < plain().peak == three.peak - ids_and_labels


def test_recompute_drops_the_output_and_the_sums_of_attention() -> None:
    policy = {"memory": [{"use": "recompute", "regions": ["core_attn"]}]}
    treated = without_values(spec(**policy))
    out_and_sums = TOKENS * HEADS * (HEAD_DIM * FP32 + FP32)
    assert plain().saved_bytes - treated.saved_bytes == 2 * out_and_sums
    assert plain().by_region()["mlp_norm"] == treated.by_region()["mlp_norm"]


def test_offload_moves_what_its_region_saves_off_the_device() -> None:
    policy = {"memory": [{"use": "offload", "regions": ["dense_mlp"], "min_bytes": 1}]}
    treated = with_values(spec(**policy))
    moved = plain().saved_bytes - treated.saved_bytes
    assert 0 < moved <= plain().by_region()["dense_mlp"]
    assert "dense_mlp" not in treated.by_region()
    assert treated.off_device >= moved


WORLD = 4
SHARED_OUT = spec(
    model={**TREE["model"], "vocab_size": 64},
    parallel={"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}},
)


def measured_rank() -> Measured:
    return measure_here(fake_assembly(dict(SHARED_OUT), WORLD))


def held_by_model(measured: Measured) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in measured.held.items() if kind != "other"}


def test_ranks_hold_what_they_are_measured_to_hold_without_the_others(pool: RankPool) -> None:
    """The minimum of several runs counts, because a gloo thread sometimes keeps a collective's tensors longer."""
    runs = [pool.run(measured_rank, WORLD) for _ in range(2)]
    for rank in (0, WORLD - 1):
        truths = [run[rank] for run in runs]
        truth = min(truths, key=lambda measured: measured.saved_bytes)
        found = measure(fake_assembly(dict(SHARED_OUT), WORLD), rank=rank)
        assert held_by_model(found) == held_by_model(truth)
        assert found.by_region() == truth.by_region()
        assert found.saved_bytes == truth.saved_bytes
        assert found.peak == pytest.approx(min(measured.peak for measured in truths), rel=0.01)


@pytest.mark.parametrize("ranks_per_node", [2, *deep(1, 4)])
def test_rows_that_travel_in_two_hops_are_measured_without_the_other_ranks(ranks_per_node: int) -> None:
    layout = {"experts": {"ep": 4}, "ranks_per_node": ranks_per_node}
    one_hop, two_hops = (
        measure(fake_assembly(spec(dispatch={"use": name, "backend": "torch"}, parallel=layout), WORLD), rank=1)
        for name in ("deepep", "hybridep")
    )
    assert of_experts(two_hops, 1) == of_experts(one_hop, 1) > 0


def test_a_world_that_is_not_there_is_refused() -> None:
    with pytest.raises(ContractError, match="laid out over 4 ranks, and here are 1"):
        measure_here(fake_assembly(dict(SHARED_OUT), WORLD))


def test_a_rank_of_256_with_qwen3_235b_is_measured() -> None:
    shallow, deep = (measure(qwen3_235b(layers)) for layers in (2, 3))
    assert deep.by_region(1) == deep.by_region(2) == shallow.by_region(1)
    layers = 94 - deep_layers(deep)
    peak = deep.peak + layers * (deep.peak - shallow.peak)
    saved = deep.saved_bytes + layers * (deep.saved_bytes - shallow.saved_bytes)
    print(f"peak {peak / GIB:.2f} GiB in {deep.peak_place}, saved {saved / GIB:.2f} GiB")
    rows = 4096 // 4 * 8
    assert of_experts(deep, 1) == rows * (4096 + 2 * 1536) * 2 + rows * FP32 + 4 * INT32
    assert saved < peak < 80 * GIB


def deep_layers(measured: Measured) -> int:
    return len({one.place.layer for one in measured.saved if one.place.layer is not None})
