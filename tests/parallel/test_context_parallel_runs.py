"""Sequences that ranks of cp share train as on one rank: every algorithm, attention and thing that knows positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run

ALGORITHMS = ("allgather_kv", "ring_attention", "ulysses")
GQA = {"use": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
MLA = {"use": "mla", "num_heads": 4, "q_rank": 10, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "v_dim": 5}
ATTENTIONS = {
    "plain": GQA,
    "sinks and windows": GQA | {"num_kv_heads": 1, "sinks": True, "window": 5, "full_layers": [1]},
    "latents": MLA,
}
LAYOUTS = {
    2: {"dense": {"cp": 2}, "experts": {"ep": 2}},
    4: {"dense": {"cp": 2, "tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}},
}
MEMORY = {"gqa": ["core_attn"], "mla": ["mla_up_proj", "core_attn"]}


def tree(attention: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    model = {**SMALL["model"], "vocab_size": 64, "init_std": 0.1, "mtp_layers": 1}
    return {**SMALL, "model": model, "attention": attention, **parts}


def assert_alike(runs: list[Run], alone: Run) -> None:
    for found, wanted in zip(runs[0].results, alone.results, strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert found.aux_losses == pytest.approx(wanted.aux_losses, rel=2e-6)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_trains_as_on_one_rank(pool: RankPool, attention: Mapping[str, Any], algorithm: str) -> None:
    """Padded and packed sequences too, with tp, FSDP and recompute."""
    memory = [{"use": "recompute", "regions": MEMORY[attention["use"]]}]
    for world, padded, packed in ((2, True, False), (4, False, True)):
        (alone,) = pool.run(short_run, 1, tree(attention), 2, padded, packed)
        treated = memory if world == 4 else []
        parts = {"parallel": LAYOUTS[world], "context_parallel": {"use": algorithm}, "memory": treated}
        assert_alike(pool.run(short_run, world, tree(attention, **parts), 2, padded, packed), alone)


def test_what_is_drawn_or_balanced_is_that_of_whole_sequences(pool: RankPool) -> None:
    """Jitter and stochastic rounding are keyed by true places; balances count a sequence's tokens on all ranks."""
    balance = [{"kind": "aux_loss", "over": level} for level in ("sequence", "micro_batch", "global_batch")]
    parts = {"routing": {"use": "topk", "jitter": 0.1, "balance": balance}}
    (alone,) = pool.run(short_run, 1, tree(GQA, **parts), 2)
    assert_alike(pool.run(short_run, 2, tree(GQA, parallel=LAYOUTS[2], **parts), 2), alone)
