"""Adapters train beside frozen weights, and have the gradients of a model into which they are merged.

What other systems got silently wrong stands in the names of the tests: factors of adapters that ranks of etp, edp or tp do
not sum, gate and up in another order, experts that stay as they are while the log says that adapters are on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from test_freeze import LAYOUTS, NOWHERE, RECIPES, WAYS, WIDE, drawn, gradients
from torch import Tensor, nn

from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.optimizer import build_optimizer
from moefw.runtime.adapters import Dropout, begin_adapters
from moefw.runtime.naming import canonical_parameters, draw, initialise
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run
from moefw.training.engine import Engine
from moefw_kernels.random import token_keys
from pairwise import deep, quick
from resolved_specs import problems_of, resolved

LORA = {"use": "lora", "rank": 8, "alpha": 4.0}
SCALE = 0.5
OVER_A_FOLDER = {"weights": NOWHERE}


def tree(adapter: Mapping[str, Any] | None, **parts: Any) -> dict[str, Any]:
    """A small model with adapters, or without them."""
    model = {**SMALL["model"], "vocab_size": 256, "init_std": 0.1, "num_layers": 2, **parts.pop("model", {})}
    adapted = {} if adapter is None else {"adapter": adapter}
    over = {} if adapter is None else OVER_A_FOLDER
    train = {**SMALL["train"], "tokens_per_step": 128, "clip_norm": None, **over, **parts.pop("train", {})}
    return {**SMALL, "model": model, "train": train, **adapted, **parts}


def opened(adapter: Mapping[str, Any] | None, **parts: Any) -> tuple[nn.Module, Engine]:
    """A model whose weights bf16 holds, and its engine. Both factors of adapters are random."""
    assembly = resolved(json.dumps(tree(adapter, **parts)))
    layout = open_layout(assembly, "cpu")
    device = torch.device("cpu")
    model = build_model(assembly, layout, device, Shared())
    initialise(model, seed=0, std=lambda _: 0.2)
    with torch.no_grad():
        for piece in canonical_parameters(model):
            values = piece.of(piece.parameter)
            values.copy_(draw(piece.name, values.shape, 0.1, seed=1) if piece.of_adapter else values.bfloat16())
    optimizer = build_optimizer(assembly, model, layout, device, Shared())
    return model.train(), Engine.of(model, optimizer, layout, assembly.spec.train)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {piece.name: piece.of(piece.parameter.detach()).float().clone() for piece in canonical_parameters(model)}


def factors_of(name: str, named: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Names of A and B of a weight; None: it has none."""
    stem = name.removesuffix(".weight")
    shared = re.sub(r"(experts\.\d+)\.(gate|up)_proj", r"\1.gate_up_proj", stem)
    a, b = f"{shared}.lora_A", f"{stem}.lora_B"
    return (a, b) if b in named else None


def merge_into(plain: nn.Module, adapted: Mapping[str, Tensor]) -> None:
    """Give a model without adapters the weights of one with them, merged."""
    with torch.no_grad():
        for piece in canonical_parameters(plain):
            merged = adapted[piece.name].clone()
            factors = factors_of(piece.name, adapted)
            if factors is not None:
                a, b = factors
                merged += SCALE * adapted[b] @ adapted[a]
            piece.of(piece.parameter).copy_(merged)


def gradients_of_factors(of_weights: Mapping[str, Tensor], adapted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of adapters, given those of the merged weights: dA = s B^T dW, dB = s dW A^T."""
    found: dict[str, Tensor] = {}
    for name, grad in of_weights.items():
        factors = factors_of(name, adapted)
        if factors is not None:
            a, b = factors
            found[a] = found.get(a, 0.0) + SCALE * adapted[b].T @ grad
            found[b] = SCALE * grad @ adapted[a].T
    return found


def assert_gradients_are_those_of_the_merged_model(rtol: float, **parts: Any) -> None:
    model, engine = opened(LORA, **parts)
    plain, plain_engine = opened(None, **parts)
    adapted = values_of(model)
    merge_into(plain, adapted)
    found = gradients(model, engine)
    wanted = gradients_of_factors(gradients(plain, plain_engine), adapted)
    assert found.keys() == wanted.keys() == {name for name in adapted if ".lora_" in name}
    for name, grad in wanted.items():
        error = (found[name] - grad).abs().max() / grad.abs().max()
        assert error <= rtol, f"{name}: {error:.1e}"


IN_FP32 = [way for way, parts in WAYS.items() if "precision" not in parts]


@pytest.mark.parametrize("way", quick(IN_FP32, "grouped", "loop", "grouped, delayed", "loop, delayed", "latents"))
def test_gradients_are_those_of_the_merged_model(way: str) -> None:
    """Bridge#5376: gate and up in another order. unsloth#6936: experts that stay as they are."""
    assert_gradients_are_those_of_the_merged_model(2e-5, **WAYS[way])


@pytest.mark.parametrize("way", quick(["grouped, delayed", "recomputed", "offloaded", "merged", "stashed"], "stashed"))
def test_gradients_in_bf16_have_the_same_bits_when_they_are_made_otherwise(way: str) -> None:
    otherwise = {**WAYS[way], "precision": {"use": "bf16"}}
    in_order = {name: parts for name, parts in otherwise.items() if name in ("precision", "dispatch")}
    found, wanted = gradients(*opened(LORA, **otherwise)), gradients(*opened(LORA, **in_order))
    assert found.keys() == wanted.keys()
    assert [name for name, grad in found.items() if not torch.equal(grad, wanted[name])] == []


@pytest.mark.parametrize("recipe", ["fp8-blockwise", *deep(*RECIPES)])
def test_new_adapters_change_no_bit_of_a_recipes_products(recipe: str) -> None:
    """The product with the frozen weight is that of the recipe; adapters are multiplied in the dtype of activations."""
    parts = {"precision": RECIPES[recipe], "model": WIDE}
    model, _ = opened(LORA, **parts)
    plain, _ = opened(None, **parts)
    initialise(model, seed=0, std=lambda _: 0.2)
    adapted = values_of(model)
    with torch.no_grad():
        for piece in canonical_parameters(plain):
            piece.of(piece.parameter).copy_(adapted[piece.name])
        assert torch.equal(model(drawn()).loss_sum, plain(drawn()).loss_sum)


def assert_alike(runs: list[Run], alone: Run) -> None:
    """AdamW makes of the last bits of a gradient near zero a share of its step, which is 1e-3."""
    for found, wanted in zip(runs[0].results, alone.results, strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=2e-5)
    assert runs[0].last.keys() <= alone.last.keys()
    for name, weight in runs[0].last.items():
        torch.testing.assert_close(weight, alone.last[name], rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("layout", quick(LAYOUTS, "tp 2 and etp 2", "pp 2, weight gradients apart"))
@pytest.mark.parametrize("gemm", ["grouped", *deep("loop")])
def test_a_layout_changes_nothing(pool: RankPool, layout: str, gemm: str) -> None:
    """Bridge#5231 and #5376: factors that are not summed over the ranks that have other rows or other outputs."""
    parts = LAYOUTS[layout]
    (alone,) = pool.run(short_run, 1, tree(LORA, gemm={"use": gemm}), 3)
    runs = pool.run(short_run, 2, tree(LORA, gemm={"use": gemm}, **parts), 3)
    assert_alike(runs, alone)
    moved = [name for name in alone.last if not torch.equal(alone.last[name], alone.first[name])]
    assert sorted(moved) == sorted(name for name in alone.last if ".lora_" in name)


def test_adapters_of_a_shared_expert_are_those_of_all_tokens_under_ep(pool: RankPool) -> None:
    """Bridge#5396: they were taken for adapters of routed experts, which each rank sums up alone."""
    shared = {"model": {"shared_expert_dim": 32}}
    (alone,) = pool.run(short_run, 1, tree(LORA, **shared), 3)
    runs = pool.run(short_run, 2, tree(LORA, **shared, parallel={"experts": {"ep": 2}}), 3)
    assert_alike(runs, alone)
    of_shared = [name for name in alone.last if "shared_expert" in name and ".lora_" in name]
    assert len(of_shared) == 3 * 2  # the first layer is dense
    for name in of_shared:
        assert not torch.equal(alone.last[name], alone.first[name])
        assert torch.equal(runs[0].last[name], runs[1].last[name])


@pytest.mark.parametrize("layout", quick(LAYOUTS, "tp 2 and etp 2", "cp 2"))
def test_what_dropout_drops_does_not_depend_on_the_layout_or_on_a_second_run(pool: RankPool, layout: str) -> None:
    dropping = {**LORA, "dropout": 0.25}
    (alone,) = pool.run(short_run, 1, tree(dropping), 3)
    again = {"memory": [{"use": "recompute", "regions": ["layer"]}]}
    assert_alike(pool.run(short_run, 2, tree(dropping, **LAYOUTS[layout], **again), 3), alone)
    (kept,) = pool.run(short_run, 1, tree(LORA), 3)
    assert kept.results[-1].grad_norm != pytest.approx(alone.results[-1].grad_norm, rel=1e-3)


def test_dropout_keeps_its_share_of_the_inputs_and_their_mean() -> None:
    x = torch.ones(512, 64)
    keys_R = token_keys(torch.arange(4), torch.arange(128), salt=-1)
    dropped = Dropout(rate=0.25, place="here").of(x, keys_R, 0)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)
    there = Dropout(rate=0.25, place="there").of(x, keys_R, 0)
    both = ((dropped == 0) & (there == 0)).float().mean().item()
    assert both == pytest.approx(0.25**2, abs=0.01)
    right = Dropout(rate=0.25, place="here").of(x[:, 48:], keys_R, 48)
    assert torch.equal(right, dropped[:, 48:])


MORE_RANKS: dict[str, dict[str, Any]] = {
    "etp 2 with edp 2": {"parallel": {"dense": {"tp": 2}, "experts": {"etp": 2}}},
    "etp 2 with edp 2, sharded": {
        "parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"etp": 2, "shard": "all"}},
    },
    "tp 4, more than the heads of keys": {"parallel": {"dense": {"tp": 4}, "experts": {"ep": 4}}},
}


@pytest.mark.parametrize("layout", quick(MORE_RANKS, "etp 2 with edp 2, sharded"))
def test_a_layout_of_four_ranks_changes_nothing(pool: RankPool, layout: str) -> None:
    (alone,) = pool.run(short_run, 1, tree(LORA), 3)
    assert_alike(pool.run(short_run, 4, tree(LORA, **MORE_RANKS[layout]), 3), alone)


def test_a_model_with_new_adapters_computes_what_it_did_without_them() -> None:
    model, _ = opened(LORA)
    plain, _ = opened(None)
    initialise(model, seed=0, std=lambda _: 0.2)
    merge_into(plain, values_of(model))
    batch = drawn()
    with torch.no_grad():
        assert torch.equal(model(batch).loss_sum, plain(batch).loss_sum)


DORA = {"use": "dora", "rank": 6, "alpha": 3.0}
DENSE: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "latents": WAYS["latents"],
    "recomputed": WAYS["recomputed"],
    "delayed": WAYS["grouped, delayed"],
}


def begun(model: nn.Module) -> None:
    """Give random values to both factors, and to magnitudes near those that they begin with."""
    begin_adapters(model)
    with torch.no_grad():
        for piece in canonical_parameters(model):
            if piece.name.endswith("lora_magnitude"):
                values = piece.of(piece.parameter)
                values.mul_(1 + draw(piece.name, values.shape, 0.1, seed=1))


@pytest.mark.parametrize("way", quick(DENSE, "grouped queries", "latents"))
def test_gradients_of_dora_are_those_of_its_formula(way: str) -> None:
    """Autograd of ``m V / |V|``, the norm held constant (arXiv 2402.09353, section 4.3), given the weights' gradients."""
    model, engine = opened(DORA, **DENSE[way])
    plain, plain_engine = opened(None, **DENSE[way])
    begun(model)
    adapted = {name: value.double().requires_grad_() for name, value in values_of(model).items()}
    merged = {}
    for name in values_of(plain):
        stem = name.removesuffix(".weight")
        merged[name] = adapted[name]
        if f"{stem}.lora_A" in adapted:
            direction = adapted[name] + SCALE * adapted[f"{stem}.lora_B"] @ adapted[f"{stem}.lora_A"]
            norms = direction.detach().norm(dim=1)
            merged[name] = (adapted[f"{stem}.lora_magnitude"] / norms).unsqueeze(1) * direction
    with torch.no_grad():
        for piece in canonical_parameters(plain):
            piece.of(piece.parameter).copy_(merged[piece.name])
    found, of_weights = gradients(model, engine), gradients(plain, plain_engine)
    changed = [name for name in merged if merged[name] is not adapted[name]]
    torch.autograd.backward([merged[name] for name in changed], [of_weights[name].double() for name in changed])
    assert found.keys() == {name for name in adapted if ".lora_" in name}
    assert any(name.endswith("o_proj.lora_magnitude") for name in found)
    for name, grad in found.items():
        torch.testing.assert_close(grad.double(), adapted[name].grad, rtol=0, atol=2e-4 * grad.abs().max().item())


@pytest.mark.parametrize("layout", quick(LAYOUTS, "tp 2 and etp 2", "FSDP"))
def test_a_layout_changes_nothing_of_dora(pool: RankPool, layout: str) -> None:
    """Rows of a weight whose inputs are split have the norm of all of their parts."""
    (alone,) = pool.run(short_run, 1, tree(DORA), 3)
    assert_alike(pool.run(short_run, 2, tree(DORA, **LAYOUTS[layout]), 3), alone)


def test_dora_has_no_adapters_of_experts() -> None:
    (problem,) = problems_of(json.dumps(tree({"use": "dora", "targets": ["moe.experts.*"]})))
    assert "moe.experts.*: dora has no adapters of routed experts, as PEFT has none. Use lora for them." in problem
