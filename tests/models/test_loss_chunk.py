"""A loss in chunks of tokens equals the loss over all of them, and never holds all of their logits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from broken_precisions import Int8ByPass
from ledger_cases import MODEL, SHARED_OUT, TRAIN, assembly_of, check
from moefw.core.errors import PlanError
from moefw.planner import ledger
from moefw.runtime.naming import canonical_parameters
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, train, whole_model
from moefw.training.engine import evaluate
from moefw.training.micro_batches import in_order
from pairwise import deep, each_value

BF16 = 2.0**-8
ODD = 7
"""A chunk that does not divide the tokens."""


def found(chunk: int | None, *, precision: str = "fp32", pad: int | None = None, **sizes: Any) -> dict[str, Tensor]:
    """Loss and gradients of a step of two micro-batches, the first with masked tokens, by name."""
    given = {"loss_chunk": chunk, "pad_id": pad, **sizes}
    case = whole_model(1, parts={"precision": {"use": precision}}, plugins=(), sizes=given)
    model, assembly, layout, _ = open_model(case)
    scale = torch.tensor(1.0 / assembly.spec.train.tokens_per_step)
    first, *others = [replace(one, loss_scale=scale) for one in global_batch(assembly, layout, 0)[:2]]
    mask_BS = torch.ones_like(first.ids_BS, dtype=torch.bool)
    mask_BS[0, 3:] = False
    batches = [replace(first, mask_BS=mask_BS), *others]
    loss = in_order(model)(batches, lambda *_: nullcontext()).loss[0]
    held = {"held out": torch.tensor(evaluate(model, batches, layout))}
    return {"loss": loss, **held} | {one.name: one.of(one.parameter.grad) for one in canonical_parameters(model)}


@pytest.mark.parametrize(
    ("precision", "tied", "ahead", "chunk"), each_value(["fp32", "bf16"], [False, True], [0, 1], [ODD, 1, 1000])
)
def test_losses_and_gradients_are_those_of_all_tokens(precision: str, tied: bool, ahead: int, chunk: int) -> None:
    sizes = {"precision": precision, "tie_embeddings": tied, "mtp_layers": ahead}
    right, mine = found(None, **sizes), found(chunk, **sizes)
    allowed = 1e-5 if precision == "fp32" else BF16
    for name, value in right.items():
        assert (mine[name] - value).abs().max() <= allowed * value.abs().max().clamp_min(1e-9), name


def trained(parts: dict[str, Any], chunk: int | None) -> list[float]:
    sizes = {"loss_chunk": chunk, "mtp_layers": 1, "vocab_size": 62}
    case = whole_model(dist.get_world_size(), parts=parts, plugins=(), sizes=sizes, micro_batch=1)
    results = train(case, 2).results
    return [value for one in results for value in (one.loss, one.aux_losses["mtp_1_loss"], one.grad_norm)]


@pytest.mark.parametrize(
    "parts",
    [
        *deep({"parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"shard": "all"}}}),
        {"parallel": {"dense": {"cp": 2}, "experts": {"ep": 2}}},
        {"parallel": {"pp": 2}, "pipeline": {"use": "zero-bubble"}},
    ],
    ids=["tp and fsdp", "cp", "stages"],
)
def test_ranks_that_split_the_model_train_alike(pool: RankPool, parts: dict[str, Any]) -> None:
    world = 4 if "shard" in str(parts) else 2
    right, mine = (pool.run(trained, world, parts, chunk)[0] for chunk in (None, ODD))
    assert mine == pytest.approx(right, rel=2e-5)


def test_the_plan_holds_a_chunk_of_logits_and_equals_a_measured_step() -> None:
    logits = TRAIN["micro_batch"] * TRAIN["seq_len"] * 4096 // 2 * 4  # of a rank of tp, in fp32
    whole, chunked = (
        assembly_of({**SHARED_OUT, "model": {**MODEL, "vocab_size": 4096, "loss_chunk": chunk}}, 8)
        for chunk in (None, 64)
    )
    check(chunked)
    before, after = (ledger(one, micro_batches=2) for one in (whole, chunked))
    assert before.totals["saved"] - after.totals["saved"] >= 0.99 * logits
    assert before.peak_bytes - after.peak_bytes >= logits


def test_a_head_with_operands_for_each_pass_is_refused() -> None:
    parts = {"precision": {"use": Int8ByPass.name}}
    case = whole_model(1, parts=parts, plugins=(Int8ByPass,), sizes={"loss_chunk": ODD})
    with pytest.raises(PlanError, match=r"model\.loss_chunk: the recipe of the head has operands of its own"):
        open_model(case)
