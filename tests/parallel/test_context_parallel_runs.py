"""Sequences that ranks of cp share train as on one rank: with everything that counts tokens or knows positions.

What other systems got silently wrong under context parallelism stands in the names of the tests: Megatron-LM issues
7452 (findings on sinks and on masked losses), 3943 (MTP), 1652 (auxiliary losses) and 673 (loss scale).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run
from pairwise import deep, quick

GQA = {"use": "gqa", "num_heads": 4, "num_kv_heads": 1, "head_dim": 8}
MLA = {"use": "mla", "num_heads": 4, "q_rank": 10, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "v_dim": 5}
SINKS = GQA | {"sinks": True, "window": 5, "full_layers": [1]}
TWO = {"dense": {"cp": 2}, "experts": {"ep": 2}}
FOUR = {"dense": {"cp": 2, "tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}


def tree(attention: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    model = {**SMALL["model"], "vocab_size": 64, "init_std": 0.1, "mtp_layers": 1, "num_layers": 2}
    train = {**SMALL["train"], "tokens_per_step": 128}
    return {**SMALL, "model": model, "train": train, "attention": attention, **parts}


def assert_alike(runs: list[Run], alone: Run) -> None:
    for found, wanted in zip(runs[0].results, alone.results, strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert found.aux_losses == pytest.approx(wanted.aux_losses, rel=2e-6)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-6)
        assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=5e-6)
        assert found.router_entropy_L == pytest.approx(wanted.router_entropy_L, rel=2e-6)
        assert found.load_LE == wanted.load_LE
        assert found.counts == wanted.counts


def compare(pool: RankPool, spec: Mapping[str, Any], padded: bool, packed: bool, **shared: Any) -> None:
    (alone,) = pool.run(short_run, 1, dict(spec), 2, padded, packed)
    world = 4 if shared["parallel"] is FOUR else 2
    assert_alike(pool.run(short_run, world, {**spec, **shared}, 2, padded, packed), alone)


def test_sinks_windows_and_packed_documents_under_tp_and_fsdp(pool: RankPool) -> None:
    compare(pool, tree(SINKS), padded=False, packed=True, parallel=FOUR)


def test_masked_losses_and_further_tokens_of_latents_recomputed_on_a_ring(pool: RankPool) -> None:
    memory = [{"use": "recompute", "regions": ["mla_up_proj", "core_attn"]}]
    ring = {"use": "ring_attention"}
    compare(pool, tree(MLA), padded=True, packed=True, parallel=TWO, context_parallel=ring, memory=memory)


def test_auxiliary_losses_and_jitter_are_those_of_whole_sequences(pool: RankPool) -> None:
    balance = [{"kind": "aux_loss", "over": level} for level in ("sequence", "micro_batch", "global_batch")]
    routing = {"use": "topk", "jitter": 0.1, "balance": [*balance, {"kind": "z_loss"}]}
    spec = tree(GQA, routing=routing)
    compare(pool, spec, padded=True, packed=False, parallel=TWO, context_parallel={"use": "ulysses"})


@pytest.mark.parametrize("drop", ["probs", *deep("position")])
def test_a_capacity_over_the_micro_batch_drops_the_same_choices(pool: RankPool, drop: str) -> None:
    capacity = {"factor": 0.8, "drop": drop, "over": "micro_batch"}
    compare(pool, tree(GQA, routing={"use": "topk", "capacity": capacity}), padded=True, packed=False, parallel=FOUR)


WHOLE: dict[str, Any] = {
    "sinkhorn": {"use": "sinkhorn", "z_loss": 0.01},
    "quantile": {"use": "topk", "balance": [{"kind": "quantile", "ema": 0.5}]},
}


@pytest.mark.parametrize("router", quick(WHOLE, "sinkhorn"))
def test_routers_of_a_micro_batch_see_the_tokens_of_all_ranks_that_share_it(pool: RankPool, router: str) -> None:
    compare(pool, tree(GQA, routing=WHOLE[router]), padded=True, packed=False, parallel=FOUR)


def test_stochastic_rounding_is_keyed_by_true_places(pool: RankPool) -> None:
    nvfp4 = {"use": "nvfp4", "backend": "emulate", "keep_bf16": []}
    model = {"dim": 32, "dense_dim": 64, "expert_dim": 32, "shared_expert_dim": 32, "num_layers": 2, "num_experts": 4}
    spec = {**SMALL, "model": {**SMALL["model"], **model}, "precision": nvfp4}
    (alone,) = pool.run(short_run, 1, spec, 1)
    (one, _) = pool.run(short_run, 2, {**spec, "parallel": {"dense": {"cp": 2}}}, 1)
    assert one.results[0].grad_norm == pytest.approx(alone.results[0].grad_norm, rel=2e-2)


@cache
def long_sequence(cp: int) -> dict[str, Any]:
    sizes = {"num_layers": 1, "num_dense_layers": 0, "dim": 16, "num_experts": 2, "top_k": 1, "expert_dim": 16}
    model = {**SMALL["model"], **sizes, "shared_expert_dim": 0, "vocab_size": 64, "init_std": 0.1}
    return {
        **SMALL,
        "model": model,
        "attention": {"use": "gqa", "num_heads": 2, "num_kv_heads": 1, "head_dim": 8},
        "train": {**SMALL["train"], "tokens_per_step": 2048, "micro_batch": 1, "seq_len": 2048},
        "parallel": {"dense": {"cp": cp}},
    }


def test_a_long_sequence_has_one_loss_on_one_rank_and_many(pool: RankPool) -> None:
    (alone,) = pool.run(short_run, 1, long_sequence(1), 1)
    for cp in (2, 4):
        found, *_ = pool.run(short_run, cp, long_sequence(cp), 1)
        for one, wanted in zip(found.results, alone.results, strict=True):
            assert one.loss == pytest.approx(wanted.loss, rel=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("algorithm", ["allgather_kv", "ring_attention", "ulysses"])
@pytest.mark.parametrize(("attention", "length"), [(None, 32768), (MLA, 8192)], ids=["gqa", "mla"])
def test_a_very_long_sequence_has_one_loss_on_eight_ranks(
    pool8: RankPool, attention: Mapping[str, Any] | None, length: int, algorithm: str
) -> None:
    def spec(cp: int) -> dict[str, Any]:
        base = long_sequence(cp)
        train = {**base["train"], "tokens_per_step": length, "seq_len": length}
        heads = 8 if algorithm == "ulysses" else 2
        chosen = {**(attention or base["attention"]), "num_heads": heads}
        return {**base, "train": train, "attention": chosen, "context_parallel": {"use": algorithm}}

    (alone,) = pool8.run(short_run, 1, spec(1), 1, timeout_s=900.0)
    for cp in (2, 8):
        found, *_ = pool8.run(short_run, cp, spec(cp), 1, timeout_s=900.0)
        assert found.results[0].loss == pytest.approx(alone.results[0].loss, rel=1e-5)
