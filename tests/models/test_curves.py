"""Fifty steps of AdamW from the same weights on the same tokens give the curve that ``transformers`` gives."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import VOCABULARY, theirs
from moefw import from_pretrained
from moefw.core.stages import Batch
from moefw.training.engine import Engine
from pairwise import quick

STEPS, SEQUENCES, POSITIONS, LR, BETAS = 50, 4, 24, 2e-3, (0.9, 0.95)
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_experts_per_tok": 2, "initializer_range": 0.2},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 8, "num_key_value_heads": 2},
    "gpt_oss": {"num_local_experts": 8, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    "deepseek_v3": {
        **{"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2},
        **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
        **{"num_key_value_heads": 4, "first_k_dense_replace": 1},
    },
}


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that repeats words, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
    ids = (start + torch.arange(POSITIONS + 1) ** 2) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


@contextmanager
def no_clock(*_: object) -> Iterator[None]:
    yield


@pytest.mark.parametrize("family", quick(FAMILIES, "gpt_oss", "deepseek_v3"))
def test_the_loss_of_every_step_is_that_of_transformers(family: str) -> None:
    oracle = theirs(family, {**SIZES, **FAMILIES[family]})
    routing = {"balance": [{"kind": "expert_bias", "rate": 0.0}]} if family == "deepseek_v3" else {}
    with tempfile.TemporaryDirectory() as folder:
        oracle.save_pretrained(folder)
        found = from_pretrained(Path(folder), routing=routing)
    mine, wanted = (
        torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0) for model in (found.module, oracle)
    )
    engine = Engine(found.module, mine, found.layout, clip_norm=None)
    losses = []
    for step in range(STEPS):
        ids, labels = tokens(step)
        wanted.zero_grad()
        loss = torch.nn.functional.cross_entropy(oracle(input_ids=ids).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        wanted.step()
        losses.append(loss.item())
        halves = zip(ids.split(2), labels.split(2), strict=True)
        batches = [Batch(ids_BS=one, labels_BS=other) for one, other in halves]
        assert engine.step(batches, LR, no_clock).loss == pytest.approx(losses[-1], rel=1e-4), step
    assert losses[-1] < 0.9 * losses[0]
