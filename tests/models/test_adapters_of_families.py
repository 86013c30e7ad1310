"""Adapters of every family that is read: merged, they are what ``transformers`` computes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moefw
from adapted_models import LORA, adapted, tensors_of_adapter
from hf_models import MODELS, VOCABULARY, loaded, model_of
from moefw.compose.adapter_weights import adapter_config
from moefw.models.huggingface.adapter_files import write_adapter
from moefw.models.huggingface.adapter_folder import AdapterFolder
from moefw.models.huggingface.loading import wanted
from moefw.runtime.naming import canonical_parameters, draw
from moefw.testing.pool import RankPool
from pairwise import deep, quick

IDS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


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


def test_dropout_is_of_training_alone_and_new_at_each_forward(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path / "in")
    model = adapted(tmp_path / "in", {**LORA, "dropout": 0.5})
    first, second = model(IDS), model(IDS)
    assert torch.equal(first, second)
    model.train()
    torch.manual_seed(0)
    dropped = model(IDS)
    assert not torch.equal(dropped, model(IDS))
    torch.manual_seed(0)
    assert torch.equal(dropped, model(IDS))


def drop_in_parts(folder: Path) -> torch.Tensor:
    """Logits with dropout, on ranks of tp whose generators differ."""
    model = adapted(
        folder / "in", {**LORA, "dropout": 0.5}, parallel={"dense": {"tp": 2}, "experts": {"ep": 2}}
    ).train()
    torch.manual_seed(dist.get_rank())
    return model(IDS).detach()


def test_ranks_that_share_sequences_drop_the_same(pool: RankPool, tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path / "in")
    model = adapted(tmp_path / "in", {**LORA, "dropout": 0.5}).train()
    torch.manual_seed(0)
    wanted = model(IDS).detach()
    for logits in pool.run(drop_in_parts, 2, tmp_path):
        assert (logits - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def save_split(folder: Path, parallel: dict[str, object]) -> None:
    model = adapted(folder / "in", parallel=parallel)
    moefw.save_pretrained(model, folder / "split")


@pytest.mark.parametrize(
    "parallel",
    [
        {"dense": {"tp": 2}, "experts": {"ep": 2, "etp": 2}},
        {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}},
    ],
    ids=["split", "sharded"],
)
def test_ranks_merge_their_parts(pool: RankPool, parallel: dict[str, object], tmp_path: Path) -> None:
    """Model-Optimizer#1631: a folder that was written by 8 ranks of ep had lost 7 of 8 experts."""
    oracle = model_of("deepseek_v3")
    oracle.save_pretrained(tmp_path / "in")
    moefw.save_pretrained(adapted(tmp_path / "in"), tmp_path / "whole")
    pool.run(save_split, 4, tmp_path, parallel)
    wanted, found = (loaded(oracle, tmp_path / name) for name in ("whole", "split"))
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def as_written_by_peft(peft: Any, folder: Path, shapes: Mapping[str, Any], family: str) -> dict[str, torch.Tensor]:
    """What a model of PEFT has, by our names."""
    peft.save_pretrained(folder)
    adapter = AdapterFolder(folder, shapes, model_type=family, num_layers=9)
    with adapter.reading() as read:
        return {name: read(name).clone() for name in adapter.shapes}


@pytest.mark.parametrize("family", quick(MODELS, "qwen3_moe", "gpt_oss", "deepseek_v3"))
@pytest.mark.parametrize("use", ["lora", *deep("dora")])
def test_gradients_and_five_steps_of_adamw_are_those_of_peft(family: str, use: str, tmp_path: Path) -> None:
    from peft import PeftModel

    oracle = model_of(family)
    oracle.save_pretrained(tmp_path / "base")
    options = {**LORA, "use": use, **({"targets": ["attention.*"]} if use == "dora" else {})}
    model = adapted(tmp_path / "base", options).train()
    own = tensors_of_adapter(model)
    write_adapter(
        tmp_path / "adapter",
        adapter_config(model.assembly),
        {name: tuple(value.shape) for name, value in own.items()},
        own.__getitem__,
        model_type=family,
        num_layers=9,
    )
    peft = PeftModel.from_pretrained(oracle, tmp_path / "adapter", is_trainable=True)
    shapes = dict(wanted(model.module))
    optimizers = [
        torch.optim.AdamW([each for each in trained.parameters() if each.requires_grad], lr=1e-2, weight_decay=0.1)
        for trained in (model.module, peft)
    ]
    for step in range(5):
        ids = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(step))
        losses = [
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            for logits in (model(ids), peft(input_ids=ids).logits)
        ]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        if step == 0:
            compare_gradients(model, peft, tmp_path / "gradients", shapes, family)
        for optimizer in optimizers:
            optimizer.step()
    theirs = as_written_by_peft(peft, tmp_path / "after", shapes, family)
    assert theirs.keys() == own.keys()
    for name, value in tensors_of_adapter(model).items():
        # AdamW makes of the last bits of a gradient near zero a share of its step.
        error = (value - theirs[name]).norm() / theirs[name].norm()
        assert error < 2e-3, f"{name}: {error:.1e}"


def compare_gradients(model: moefw.Pretrained, peft: Any, folder: Path, shapes: Mapping[str, Any], family: str) -> None:
    """Compare every gradient: PEFT writes its own as if they were its adapters."""
    copy = deepcopy(peft)
    with torch.no_grad():
        pairs = zip(copy.parameters(), peft.parameters(), strict=True)
        for parameter, original in pairs:
            if original.requires_grad:
                parameter.copy_(original.grad)
    theirs = as_written_by_peft(copy, folder, shapes, family)
    for piece in canonical_parameters(model.module):
        if piece.of_adapter:
            grad = piece.of(piece.parameter.grad)
            error = (grad - theirs[piece.name]).norm() / theirs[piece.name].norm().clamp_min(1e-8)
            assert error < 1e-4, f"{piece.name}: {error:.1e}"


def test_a_model_begins_with_an_adapter_of_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    oracle = model_of("qwen3_moe")
    oracle.save_pretrained(tmp_path / "base")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=8, lora_alpha=4, target_modules=["q_proj", "v_proj"], target_parameters=parameters)
    peft = get_peft_model(oracle, config).eval()
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(draw(name, parameter.shape, 0.05, seed=2))
    peft.save_pretrained(tmp_path / "adapter")
    targets = ["attention.q_proj", "attention.v_proj", "moe.experts.*"]
    begins = {**LORA, "weights": str(tmp_path / "adapter"), "targets": targets}
    wanted_logits = peft(input_ids=IDS).logits
    logits = moefw.from_pretrained(tmp_path / "base", adapter=begins).eval()(IDS)
    assert (logits - wanted_logits).abs().max() <= 2e-5 * wanted_logits.abs().max()
    with pytest.raises(moefw.CheckpointError) as caught:
        moefw.from_pretrained(tmp_path / "base", adapter={**begins, "targets": None, "alpha": 16.0, "rank": 16})
    told = str(caught.value)
    assert "rank of the adapter is 16, and" in told
    assert "has 8. Let the spec say so." in told
    assert "alpha of the adapter is 16.0" in told
    assert "lacks layers.0.attention.k_proj.lora_A" in told
