"""``primary_weights: bf16``: weights are rounded to bf16, in which shards are gathered, before they are quantized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gathers import Gathers
from moefw.compose.optimizer import build_optimizer
from moefw.core.records import GemmPass
from moefw.runtime.compute.product import linear
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.training import SMALL
from moefw.training.engine import Engine
from te_recipes import RECIPES, recipe

USES = ("fp8-blockwise", "fp8-tensor", "mxfp8", "nvfp4")
SHARDED: dict[str, Any] = {"dense": {"shard": "all"}, "experts": {"shard": "all"}}
WHOLE: dict[str, Any] = {"dense": {}, "experts": {}}


@contextmanager
def no_clock(*_: object) -> Iterator[None]:
    yield


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
@pytest.mark.parametrize("during", ["fprop", "dgrad"])
def test_codes_are_those_of_the_rounded_weight(name: str, during: GemmPass) -> None:
    weight = drawn(64, 48)
    exact, rounded = recipe(name, "emulate"), recipe(name, "emulate", primary_weights="bf16")
    found = rounded.quantize(weight, role="weight", during=during)
    assert torch.equal(found, exact.quantize(weight.bfloat16().float(), role="weight", during=during))
    assert not torch.equal(found, exact.quantize(weight, role="weight", during=during))
    (of_step,) = rounded.at("gate").weight_operands(weight, (during,)).values()
    assert torch.equal(of_step(), found)


@pytest.mark.parametrize("name", RECIPES)
def test_rows_are_not_rounded(name: str) -> None:
    x, weight = drawn(64, 48), drawn(32, 48).bfloat16().float()
    found = []
    for primary_weights in ("fp32", "bf16"):
        made = recipe(name, "emulate", primary_weights=primary_weights).at("gate", groups=1)
        given, parameter = x.clone().requires_grad_(), nn.Parameter(weight)
        out = linear(given, parameter, made)
        out.square().sum().backward()
        found.append((out.detach(), given.grad, parameter.grad))
    for exact, rounded in zip(*found, strict=True):
        assert exact is not None
        assert rounded is not None
        assert torch.equal(exact, rounded)


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "current", "nvfp4"])
def test_transformer_engine_quantizes_the_rounded_weight(te: Any, name: str) -> None:
    weight = drawn(256, 384)
    rounded: Any = recipe(name, "te", primary_weights="bf16").quantize(weight, role="weight", during="fprop")
    wanted = recipe(name, "emulate").quantize(weight.bfloat16(), role="weight", during="fprop")
    assert torch.equal(rounded.matrices[0].matrix("rowwise"), wanted)


def layer_case(use: str, primary_weights: str, parallel: dict[str, Any]) -> LayerCase:
    precision = {"use": use, "backend": "emulate", "primary_weights": primary_weights}
    if use == "nvfp4":
        precision |= {"keep_bf16": [], "stochastic_rounding": False}
    train = {**SMALL["train"], "tokens_per_step": 64, "micro_batch": 1}
    parts = {"precision": precision, "parallel": parallel, "train": train}
    return whole_model(2, parts=parts, plugins=(), sizes={"vocab_size": 64, "num_layers": 1, "num_dense_layers": 0})


def losses(use: str, primary_weights: str, parallel: dict[str, Any]) -> list[float]:
    """Losses of three steps."""
    model, assembly, layout, shared = open_model(layer_case(use, primary_weights, parallel))
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    engine = Engine(model, optimizer, layout, clip_norm=None)
    results = [engine.step(global_batch(assembly, layout, step), 1e-2, no_clock) for step in range(3)]
    shared.close()
    return [result.loss for result in results]


@pytest.mark.parametrize("use", USES)
def test_a_rank_that_holds_whole_weights_computes_what_shards_do(pool: RankPool, use: str) -> None:
    """The first loss bit for bit. Gradients of what was gathered in bf16 are rounded to it once a micro-batch."""
    (sharded, *_), (whole, *_) = (pool.run(losses, 2, use, "bf16", parallel) for parallel in (SHARDED, WHOLE))
    assert sharded[0] == whole[0]
    assert sharded == pytest.approx(whole, rel=2e-3)
    (exact, *_) = pool.run(losses, 2, use, "fp32", SHARDED)
    assert exact[0] != sharded[0]


def sent(primary_weights: str) -> int:
    """Bytes that a rank sends to gather the experts of a layer."""
    model, *_ = open_model(layer_case("mxfp8", primary_weights, SHARDED))
    experts: Any = model.layers[0].moe.experts  # type: ignore[index, union-attr]
    with Gathers() as counted:
        experts.unshard()
    experts.reshard()
    return counted.nbytes


def test_shards_are_gathered_in_half_the_bytes(pool: RankPool) -> None:
    (exact, *_), (rounded, *_) = pool.run(sent, 2, "fp32"), pool.run(sent, 2, "bf16")
    assert exact == 2 * rounded > 0
