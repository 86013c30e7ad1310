"""Operands of weights are made once a step, and gradients are added up in place; both equal what autograd does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefw.core.contracts import Layout, Precision
from moefw.core.stages import Batch
from moefw.models.embedding import lookup
from moefw.runtime.compute import weights
from moefw.runtime.compute.casts import BF16Recipe
from moefw.runtime.compute.product import linear
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.training.engine import Engine, evaluate
from moefw.training.micro_batches import in_order
from pairwise import each_value

RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {"use": "fp32"},
    "bf16": {"use": "bf16"},
    "blockwise": {"use": "fp8-blockwise", "backend": "emulate"},
    "mx": {"use": "mxfp8", "backend": "emulate"},
    "delayed": {"use": "fp8-tensor", "backend": "emulate", "scaling": "delayed"},
    "nvfp4": {"use": "nvfp4", "backend": "emulate", "keep_bf16": []},
    "nvfp4 by pass": {"use": "nvfp4", "backend": "emulate", "keep_bf16": [], "square_weights": False},
}
BATCHES = 3
SIZES = {"dim": 32, "expert_dim": 32, "shared_expert_dim": 32, "num_dense_layers": 1, "dense_dim": 32}
TRAIN = {"tokens_per_step": BATCHES * 32, "micro_batch": 2, "seq_len": 16}


def opened(**parts: Any) -> tuple[Any, list[Batch], Layout]:
    case = whole_model(1, parts={**parts, "train": TRAIN}, plugins=(), sizes={**SIZES, **parts.pop("model", {})})
    model, assembly, layout, _ = open_model(case)
    scale = torch.tensor(1.0 / TRAIN["tokens_per_step"])
    return model, [replace(batch, loss_scale=scale) for batch in global_batch(assembly, layout, 0)], layout


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def by_autograd(model: nn.Module, batches: Sequence[Batch]) -> dict[str, Tensor]:
    for batch in batches:
        (model(batch).objective * batch.loss_scale).backward()
    return gradients(model)


def in_a_step(model: nn.Module, batches: Sequence[Batch]) -> dict[str, Tensor]:
    in_order(model)(batches, lambda *_: nullcontext())
    return gradients(model)


def assert_alike(found: dict[str, Tensor], right: dict[str, Tensor], *, recipe: str) -> None:
    assert found.keys() == right.keys()
    for name, grad in right.items():
        error = (found[name] - grad).abs().max() / grad.abs().max().clamp_min(1e-9)
        assert error <= (1e-5 if recipe == "fp32" else 2e-2), name


@pytest.mark.parametrize(("recipe", "gemm"), each_value(RECIPES, ["grouped", "loop"]))
def test_gradients_are_those_of_autograd(recipe: str, gemm: str) -> None:
    model, batches, _ = opened(precision=RECIPES[recipe], gemm={"use": gemm})
    assert_alike(in_a_step(model, batches), by_autograd(model, batches), recipe=recipe)


@pytest.mark.parametrize("mechanism", ["recompute", "offload"])
def test_gradients_are_those_of_autograd_under_memory_policies(mechanism: str) -> None:
    policy = {"use": mechanism, "regions": ["attention", "expert_fc1", "expert_fc2", "dense_mlp"]}
    regions = policy["regions"] if mechanism == "offload" else ["attention", "expert_fc1", "moe_act", "dense_mlp"]
    model, batches, _ = opened(precision=RECIPES["bf16"], memory=[{**policy, "regions": regions}])
    assert_alike(in_a_step(model, batches), by_autograd(model, batches), recipe="bf16")


def test_a_head_tied_to_the_embedding_adds_to_one_gradient() -> None:
    model, batches, _ = opened(precision=RECIPES["bf16"], model={"tie_embeddings": True})
    assert_alike(in_a_step(model, batches), by_autograd(model, batches), recipe="bf16")


def test_gradients_of_embeddings_are_added_in_place_but_for_those_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = int(opened()[1][0].ids_BS[0, 0])
    model, batches, _ = opened(precision=RECIPES["bf16"], model={"pad_id": pad})
    right, scattered, scatter = by_autograd(model, batches), list[Any](), weights._scattered
    monkeypatch.setattr(weights, "_scattered", lambda *given: scattered.append(given) or scatter(*given))
    found = in_a_step(model, batches)
    assert_alike(found, right, recipe="bf16")
    assert not found["embed.weight"][pad].any()
    assert len(scattered) == 1, "the first micro-batch alone makes a gradient of its own"


class Adds:
    """A gradient of rows that adds its product itself."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def add_wgrad(self, main: Tensor, x: Tensor, ends_e: Tensor | None, *, fresh: bool) -> None:
        if fresh:
            main.zero_()
        main.addmm_(self.rows.T, x)


def test_an_operand_may_add_its_gradient_itself() -> None:
    """The first product is written, the second is added, both into the gradient of the parameter."""
    weight = nn.Parameter(torch.zeros(3, 2))
    rows, x = torch.randn(5, 3), torch.randn(5, 2)
    with shared_by_micro_batches([weight]):
        shared = weights._in_step[weight]
        for count in (1, 2):
            shared.add(Adds(rows), x, None)
            torch.testing.assert_close(weight.grad, count * rows.T @ x)


def test_many_gradients_of_one_row_are_added_up_in_fp32() -> None:
    """From 256 on, a sum in bf16 no longer grows by ones."""
    weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    rows = torch.ones(300, dtype=torch.int64)
    with shared_by_micro_batches([weight]):
        for count in (1, 2):
            found = lookup(weight, rows, None)
            found.backward(torch.ones_like(found))
            assert weight.grad is not None
            assert weight.grad.tolist() == [[0.0] * 2, [300.0 * count] * 2, [0.0] * 2]


@pytest.mark.parametrize(("recipe", "gemm"), each_value(RECIPES, ["grouped", "loop"]))
def test_each_weight_is_quantized_once_a_step(recipe: str, gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches, layout = opened(precision=RECIPES[recipe], gemm={"use": gemm})
    made = Counter[int]()
    for kind in {type(one) for one in recipes_of(model)}:
        monkeypatch.setattr(kind, "weight_operands", counting(kind.weight_operands, made))
        monkeypatch.setattr(kind, "quantize", refusing_weights(kind.quantize, made))
    in_a_step(model, batches)
    linear = [one for name, one in model.named_parameters() if one.dim() > 1 and not re.search("router|embed", name)]
    assert made == dict.fromkeys(map(Tensor.data_ptr, linear), 1)
    evaluate(model, batches, layout)
    assert made == dict.fromkeys(map(Tensor.data_ptr, linear), 2)


def recipes_of(model: nn.Module) -> Iterator[Precision]:
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Precision):
                yield value
        if isinstance(module, Precision):
            yield module


def counting(operands: Any, made: Counter[int]) -> Any:
    def counted(self: Precision, weight: Tensor, passes: Sequence[Any]) -> Any:
        made[weight.data_ptr()] += 1
        return operands(self, weight, passes)

    return counted


def refusing_weights(quantize: Any, made: Counter[int]) -> Any:
    def checked(self: Precision, x: Tensor, *, role: Any, **given: Any) -> Any:
        assert role != "weight" or x.data_ptr() in made, "a weight is quantized outside of weight_operands"
        return quantize(self, x, role=role, **given)

    return checked


def test_operands_are_freed_with_the_step_and_follow_the_weights() -> None:
    model, batches, _ = opened(precision=RECIPES["bf16"])
    first = in_a_step(model, batches)
    assert not weights._in_step
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    second, right = in_a_step(model, batches), by_autograd(model, batches)
    assert_alike(second, right, recipe="bf16")
    assert any(not torch.allclose(first[name], grad, rtol=0.1) for name, grad in second.items())


def test_a_frozen_weight_gets_no_gradient() -> None:
    model, batches, _ = opened(precision=RECIPES["bf16"])
    frozen = {name for name, _ in model.named_parameters() if re.search(r"gate_up|q_proj", name)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    found, right = in_a_step(model, batches), by_autograd(model, batches)
    assert not frozen & found.keys()
    assert_alike(found, right, recipe="bf16")


def test_the_weight_of_a_sum_is_not_bf16_where_gradients_add_up() -> None:
    """A gradient of bf16 that is added to itself 300 times would stop growing at 256 times its size."""
    weight, x, recipe = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1, dtype=torch.bfloat16), BF16Recipe()
    with shared_by_micro_batches([weight]):
        for _ in range(300):
            linear(x, weight, recipe).sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 300


def sharded_gradients() -> bool:
    parts = {"precision": RECIPES["bf16"], "parallel": {"dense": {"shard": "all"}, "experts": {"shard": "all"}}}
    train = {**TRAIN, "micro_batch": 1}
    model, assembly, layout, _ = open_model(whole_model(2, parts={**parts, "train": train}, plugins=(), sizes=SIZES))
    batches = global_batch(assembly, layout, 0)
    with shared_by_micro_batches(model.parameters()):
        shared = any(parameter in weights._in_step for parameter in model.parameters())
        for batch in batches:
            model(batch).objective.backward()
            shared |= any(parameter in weights._in_step for parameter in model.parameters())
    return shared


def test_weights_that_fsdp_gathers_are_left_to_it(pool: RankPool) -> None:
    assert pool.run(sharded_gradients, 2) == [False, False]


def engine_of(main_gradients: str) -> tuple[Any, Engine, list[Batch]]:
    model, batches, layout = opened(precision=RECIPES["bf16"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, Engine(model, optimizer, layout, clip_norm=None, main_gradients=main_gradients), batches


def test_main_gradients_in_bf16_are_fp32_for_the_optimizer_and_nearly_those_of_fp32() -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        model, engine, batches = engine_of(dtype)
        held, run = set[tuple[bool, torch.dtype]](), engine.run

        def noting(batches: Any, clock: Any, run: Any = run, model: Any = model, held: Any = held) -> Any:
            tally = run(batches, clock)
            held |= {(one.dim() > 1, one.grad.dtype) for one in model.parameters() if one.grad is not None}
            return tally

        engine.run = noting
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        for _ in range(2):
            engine.step(batches, 0.1, lambda *_: nullcontext())
        matrices = getattr(torch, dtype)
        assert held == {(True, matrices), (False, torch.float32)}
        assert {one.grad.dtype for one in model.parameters()} == {torch.float32}
        found[dtype] = {name: one.detach() - before[name] for name, one in model.named_parameters()}
    for name, moved in found["float32"].items():
        assert (found["bfloat16"][name] - moved).norm() <= 0.02 * moved.norm(), name
    assert any(not torch.equal(found["bfloat16"][name], moved) for name, moved in found["float32"].items())
