"""The top-k router with the kernels of a GPU has the choices, losses, statistics and gradients that it has without."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from test_router_topk import EXPERTS, SCORES, batch_of, router, tokens
from torch import Tensor

from moefw.core.stages import Batch, Routing
from moefw.plugins.routers.topk.options import Balance, Capacity, Groups
from moefw.runtime.router_entropy import ROUTER_ENTROPY, entropy_of_scores
from moefw_kernels.routing import limits

LEVELS = ("micro_batch", "sequence", "global_batch", "model")
LIMITS: dict[str, dict[str, Any]] = {
    "none": {},
    "groups": {"groups": Groups(count=4, keep=2)},
    "capacity": {"capacity": Capacity(factor=1.0)},
    "bias": {"balance": (Balance(kind="expert_bias"),)},
    "routes": {},
    "pack": {},
}


def batch_under(limit: str, masked: bool) -> Batch:
    """Three sequences of seven tokens, as a pack of two documents under that name."""
    more: dict[str, Any] = {}
    if limit == "routes":
        more["routes"] = {0: torch.arange(42).view(21, 2) % (EXPERTS + 1) - 1}
    if limit == "pack":
        documents_BS = (torch.arange(21) >= 8).long().unsqueeze(0)
        mask_BS = (torch.arange(21) % 3 > 0).unsqueeze(0) if masked else None
        batch = batch_of((1, 21), scale=0.1, lengths=(8, 13), documents_BS=documents_BS)
        return replace(batch, mask_BS=mask_BS, positions_BS=torch.arange(21).unsqueeze(0))
    return batch_of((3, 7), masked=masked, scale=0.1, **more)


def routed(score: str, limit: str, masked: bool) -> tuple[Routing, Tensor]:
    """Return a routing, and the gradient of its weights and losses, for weights that are not 0."""
    rules = [Balance(kind="aux_loss", over=level, coeff=0.3) for level in LEVELS]
    options = {**SCORES[score], **LIMITS[limit]}
    balance = (*rules, Balance(kind="z_loss", coeff=0.05), *options.pop("balance", ()))
    made = router(2, balance=balance, **options)
    made.global_load.copy_(torch.rand(EXPERTS, generator=torch.Generator().manual_seed(3)) * 2)
    if limit == "bias":
        made.expert_bias.copy_(torch.randn(EXPERTS, generator=torch.Generator().manual_seed(2)))
    routing = made(tokens(21), batch_under(limit, masked))
    loss = (routing.weights_TK * torch.arange(42.0).view(21, 2)).sum()
    (loss + sum(made.over_layers([routing.pooled]).values())).backward()
    assert made.weight.grad is not None
    return routing, made.weight.grad


def same_with_kernels(score: str, masks: str) -> None:
    """Under every limit, which have a mask in turn, or each without one and with one."""
    for number, limit in enumerate(LIMITS):
        if limit == "bias" and "softmax" in score:
            continue
        in_turn = (number % 2 == (masks == "first without"),)
        for masked in (False, True) if masks == "both" else in_turn:
            plain, plain_grad = routed(score, limit, masked)
            with mock.patch.object(limits, "takes_kernels", return_value=True):
                mine, my_grad = routed(score, limit, masked)
            assert torch.equal(mine.expert_ids_TK, plain.expert_ids_TK)
            # A router whose kernel keeps the scores to itself tells what the layer would make of them.
            assert plain.scores_TE is not None
            entropy = entropy_of_scores(plain.scores_TE, batch_under(limit, masked).mask_T)
            told = mine.stats.get(ROUTER_ENTROPY, entropy if mine.scores_TE is not None else None)
            torch.testing.assert_close(told, entropy, rtol=1e-5, atol=1e-5)
            assert mine.stats.keys() - {ROUTER_ENTROPY} == plain.stats.keys()
            assert all(torch.equal(mine.stats[name], plain.stats[name]) for name in plain.stats)
            for name, loss in plain.aux_losses.items():
                torch.testing.assert_close(mine.aux_losses[name], loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine.pooled["mass_E"], plain.pooled["mass_E"], rtol=1e-5, atol=1e-6)
            assert torch.equal(mine.pooled["seen_X"], plain.pooled["seen_X"])
            torch.testing.assert_close(my_grad, plain_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("score", "masks"),
    [
        ("sigmoid", "first without"),
        ("pre_softmax", "first with"),
        *(pytest.param(score, "both", marks=pytest.mark.deep) for score in SCORES),
    ],
)
def test_a_router_is_the_same_with_the_kernels_of_a_gpu(
    interpreter: ProcessPoolExecutor, score: str, masks: str
) -> None:
    interpreter.submit(same_with_kernels, score, masks).result()
