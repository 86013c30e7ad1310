"""``balance: {kind: aux_loss, over: model}`` is the loss of ``transformers`` with ``output_router_logits``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import LAYOUTS, LOGITS, LOSS, assert_gradients

from hf_models import MODELS, SIZES, VOCABULARY, theirs
from hf_steps import Tokens, our_step, their_whole_step
from moefw import from_pretrained
from moefw.testing.pool import RankPool

COEFF = 0.3
WITHOUT_SUCH_A_LOSS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2")
FAMILIES = [family for family in MODELS if family not in WITHOUT_SUCH_A_LOSS]


def given(lengths: tuple[int, int]) -> Tokens:
    ids = torch.randint(VOCABULARY, (2, 15), generator=torch.Generator().manual_seed(1))
    return Tokens(ids_BS=ids[:, :-1], labels_BS=ids[:, 1:], lengths=tuple((length,) for length in lengths))


def saved(family: str, folder: Path) -> Any:
    switches = {"output_router_logits": True, "router_aux_loss_coef": COEFF}
    oracle = theirs(family, {**SIZES, **MODELS[family], **switches})
    oracle.save_pretrained(folder)
    return oracle


@pytest.mark.parametrize("lengths", [(14, 14), (6, 14)], ids=["whole", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str, lengths: tuple[int, int], tmp_path: Path) -> None:
    """The configuration alone says so. Without the rule, the loss would be another."""
    wanted, found = their_whole_step(saved(family, tmp_path), given(lengths)), our_step(tmp_path, given(lengths), {})
    assert (found.logits - wanted.logits).abs().max() <= LOGITS * wanted.logits.abs().max()
    assert found.loss == pytest.approx(wanted.loss, rel=LOSS)
    assert_gradients([found], wanted, family)
    without = our_step(tmp_path, given(lengths), {"routing": {"balance": []}})
    assert without.loss < wanted.loss - 0.5 * COEFF


def test_ranks_that_split_the_tokens_of_a_micro_batch_pool_theirs(pool: RankPool, tmp_path: Path) -> None:
    wanted = their_whole_step(saved("qwen3_moe", tmp_path), given((6, 14)))
    train = {"tokens_per_step": 64, "micro_batch": 2, "seq_len": 16}
    steps = pool.run(our_step, 2, tmp_path, given((6, 14)), {**LAYOUTS[0], "train": train})
    assert steps[0].loss == pytest.approx(wanted.loss, rel=LOSS)
    assert_gradients(steps, wanted, "qwen3_moe")


def test_a_configuration_without_the_coefficient_means_that_of_its_family(tmp_path: Path) -> None:
    saved("olmoe", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(f'"router_aux_loss_coef": {COEFF}', '"router_aux_loss_coef": null'))
    (rule,) = from_pretrained(tmp_path).assembly.resolved()["routing"]["balance"]
    assert (rule["over"], rule["coeff"]) == ("model", 0.01)
