"""Adapters of every family that is read: merged, they are what ``transformers`` computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moefw
from hf_models import MODELS, VOCABULARY, loaded, model_of
from moefw.runtime.naming import canonical_parameters, draw
from moefw.testing.pool import RankPool

IDS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
LORA = {"use": "lora", "rank": 8, "alpha": 4.0}


def adapted(folder: Path, **sections: object) -> moefw.Pretrained:
    """A model with random adapters, the same in every layout."""
    model = moefw.from_pretrained(folder, adapter=LORA, **sections)
    with torch.no_grad():
        for piece in canonical_parameters(model.module):
            if piece.of_adapter:
                values = piece.of(piece.parameter)
                whole = draw(piece.name, piece.shard.whole(values.shape) if piece.shard else values.shape, 0.05, seed=1)
                values.copy_(piece.shard.of(whole) if piece.shard else whole)
    return model.eval()


@pytest.mark.parametrize("family", MODELS)
def test_new_adapters_change_no_logit_and_merged_ones_are_what_transformers_computes(
    family: str, tmp_path: Path
) -> None:
    oracle = model_of(family)
    oracle.save_pretrained(tmp_path / "in")
    before = moefw.from_pretrained(tmp_path / "in").eval()(IDS)
    assert torch.equal(moefw.from_pretrained(tmp_path / "in", adapter=LORA).eval()(IDS), before)
    model = adapted(tmp_path / "in")
    wanted = model(IDS)
    assert (wanted - before).abs().max() > 1e-3 * before.abs().max()
    moefw.save_pretrained(model, tmp_path / "out")
    theirs = type(oracle).from_pretrained(tmp_path / "out").eval()(input_ids=IDS).logits
    assert (theirs - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def save_split(folder: Path, parallel: dict[str, object]) -> None:
    model = adapted(folder / "in", parallel=parallel)
    moefw.save_pretrained(model, folder / "split")


def test_ranks_merge_their_parts(pool: RankPool, tmp_path: Path) -> None:
    """Model-Optimizer#1631: a folder that was written by 8 ranks of ep had lost 7 of 8 experts."""
    oracle = model_of("deepseek_v3")
    oracle.save_pretrained(tmp_path / "in")
    moefw.save_pretrained(adapted(tmp_path / "in"), tmp_path / "whole")
    pool.run(save_split, 4, tmp_path, {"dense": {"tp": 2}, "experts": {"ep": 2, "etp": 2}})
    wanted, found = (loaded(oracle, tmp_path / name) for name in ("whole", "split"))
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def save_sharded(folder: Path) -> None:
    model = moefw.from_pretrained(folder / "in", adapter=LORA, parallel={"dense": {"shard": "all"}})
    moefw.save_pretrained(model, folder / "sharded")


def test_ranks_that_shard_weights_do_not_merge(pool: RankPool, tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path / "in")
    with pytest.raises(moefw.ContractError, match="adapters are merged into weights by ranks that have both"):
        pool.run(save_sharded, 2, tmp_path)
    assert not (tmp_path / "sharded").exists()
