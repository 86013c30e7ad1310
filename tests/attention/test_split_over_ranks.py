"""An attention whose heads are split over tp trains as one rank does, sharded, recomputed and quantized, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, short_run
from pairwise import each_value

GQA = {"use": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
MLA = {"use": "mla", "num_heads": 4, "q_rank": 10, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "v_dim": 5}
ATTENTIONS = {
    "sinks, biases, windows": GQA
    | {"sinks": True, "qkv_bias": True, "out_bias": True, "window": 5, "full_layers": [1], "qk_norm": "none"},
    "a norm across heads": GQA | {"qk_norm": "all", "clip": 0.1},
    "a norm across heads, one key head": GQA | {"qk_norm": "all", "num_kv_heads": 1, "qkv_bias": True},
    "latents": MLA | {"in_bias": True, "out_bias": True},
    "queries without a latent": MLA | {"q_rank": None},
}
PARALLEL = {
    "tp 2": {"dense": {"tp": 2}, "experts": {"ep": 2}},
    "tp 2, sharded": {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}},
}
RECOMPUTED = {"gqa": ["qkv", "attn_proj"], "mla": ["mla_up_proj", "core_attn"]}


def tree(attention: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    model = {**SMALL["model"], "vocab_size": 64, "init_std": 0.1}
    return {**SMALL, "model": model, "attention": attention, **parts}


@pytest.mark.parametrize(("name", "parallel"), each_value(ATTENTIONS, PARALLEL))
def test_trains_as_on_one_rank(pool: RankPool, name: str, parallel: str) -> None:
    attention, world = ATTENTIONS[name], 4 if parallel == "tp 2, sharded" else 2
    (alone,) = pool.run(short_run, 1, tree(attention), 2)
    memory = [{"use": "recompute", "regions": RECOMPUTED[attention["use"]]}] if world == 4 else []
    runs = pool.run(short_run, world, tree(attention, parallel=PARALLEL[parallel], memory=memory), 2)
    for found, wanted in zip(runs[0].results, alone.results, strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-6)


def test_latents_take_every_recipe(pool: RankPool) -> None:
    (plain,) = pool.run(short_run, 1, tree(MLA), 2)
    for recipe in (
        {"use": "bf16"},
        {"use": "fp8-blockwise", "backend": "emulate"},
        {"use": "mxfp8", "backend": "emulate"},
    ):
        (run,) = pool.run(short_run, 1, tree(MLA, precision=recipe), 2)
        assert run.results[-1].loss == pytest.approx(plain.results[-1].loss, rel=0.02)
