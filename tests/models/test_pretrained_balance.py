"""A balance that a configuration or ``from_pretrained`` asks for is a loss to add, a state to update, or a refusal."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import moefw
from hf_models import MODELS, SIZES, VOCABULARY, theirs

IDS = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
AUX = {"balance": [{"kind": "aux_loss", "coeff": 0.5}, {"kind": "z_loss"}]}
BIAS = {"score": "sigmoid", "pre_softmax": None, "balance": [{"kind": "expert_bias", "rate": 0.1}]}


def saved(folder: Path, **options: Any) -> Any:
    oracle = theirs("qwen3_moe", {**SIZES, **MODELS["qwen3_moe"], **options})
    oracle.save_pretrained(folder)
    return oracle


def routers(model: moefw.Pretrained) -> list[Any]:
    return [block.moe.router for block in model.module.layers]


def test_the_loss_over_all_layers_is_that_of_transformers(tmp_path: Path) -> None:
    oracle = saved(tmp_path, output_router_logits=True, router_aux_loss_coef=0.3)
    wanted = oracle(input_ids=IDS, labels=IDS)
    wanted.loss.backward()
    model = moefw.from_pretrained(tmp_path)
    logits = model(IDS)
    losses = model.losses()
    assert losses.item() == pytest.approx(0.3 * wanted.aux_loss.item(), rel=1e-5)
    (F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()) + losses).backward()
    for router, layer in zip(routers(model), oracle.model.layers, strict=True):
        grad = layer.mlp.gate.weight.grad
        assert (router.weight.grad - grad).abs().max() <= 2e-5 * grad.abs().max()


def test_losses_of_layers_have_gradients_and_wait_for_who_adds_them(tmp_path: Path) -> None:
    saved(tmp_path)
    model = moefw.from_pretrained(tmp_path, routing=AUX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)
        losses = model.losses()
        losses.backward()
        assert losses > 0.5
        assert all(router.weight.grad.any() for router in routers(model))
        model(IDS)
    with pytest.warns(UserWarning, match="nobody has taken those of the forward before"):
        model(IDS)
    with torch.no_grad():
        model.eval()(IDS)


def test_without_a_balance_there_is_no_loss_and_no_warning(tmp_path: Path) -> None:
    saved(tmp_path)
    model = moefw.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)
        model(IDS)
    assert model.losses() == 0


def test_a_bias_advances_and_one_that_does_not_is_a_warning(tmp_path: Path) -> None:
    theirs("deepseek_v3", {**SIZES, **MODELS["deepseek_v3"]}).save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path, routing={"balance": [{"kind": "expert_bias", "rate": 0.1}]})
    (router,) = [module for name, module in model.named_modules() if name.endswith(".moe.router")]
    before = router.get_buffer("expert_bias").clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS).sum().backward()
    optimizer.step()
    model.update()
    assert (router.get_buffer("expert_bias") - before).abs().max() == pytest.approx(0.1)
    model(IDS).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="expert_bias, which advances in update"):
        model(IDS)


def test_a_bias_that_a_family_has_no_tensor_for_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(moefw.CheckpointError, match="its family has no such tensor"):
        moefw.from_pretrained(tmp_path, routing=BIAS)


@pytest.mark.parametrize("region", ["router", "layer"])
def test_losses_of_a_router_that_runs_twice_have_the_same_gradients(region: str, tmp_path: Path) -> None:
    saved(tmp_path)
    grads = []
    for memory in ([], [{"use": "recompute", "regions": [region]}]):
        model = moefw.from_pretrained(tmp_path, routing=AUX, memory=memory)
        (model(IDS).square().mean() + model.losses()).backward()
        grads.append([router.weight.grad for router in routers(model)])
    for plain, again in zip(*grads, strict=True):
        torch.testing.assert_close(again, plain)
