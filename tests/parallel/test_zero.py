"""Stages of ZeRO: 2 has the bits of 3, 1 those of another order of sums, and each gathers and reduces as it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fake_steps import fake_assembly
from gathers import gathers_counted
from layout_runs import deviation
from moefw.compose.optimizer import build_optimizer
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.runtime.parallel.local_shards import local
from moefw.runtime.parallel.unsharded_gradients import accumulators, added_up_unsharded
from moefw.runtime.parallel.zero import kept
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model
from moefw.testing.training import SMALL, Run, short_run
from moefw.training.engine import Engine, evaluate
from moefw.training.measured import measure, measure_here
from pairwise import quick

ALL = {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
STAGES = {"pp": 2, "dense": {"shard": "all"}, "experts": {"shard": "all"}}
MODEL = {**SMALL["model"], "vocab_size": 64}
FOUR_LAYERS = {**MODEL, "num_layers": 4}
CODES = {"use": "fp8-blockwise", "backend": "emulate", "primary_weights": "fp8", "keep_bf16": ["*.attention"]}
SHARDED: Mapping[str, dict[str, Any]] = {
    "all": {"parallel": ALL},
    "all, bf16": {"parallel": ALL, "precision": {"use": "bf16"}},
    "hybrid": {"parallel": {"dense": {"shard": 2}, "experts": {"shard": 2}}},
    "experts alone": {"parallel": {"experts": {"shard": 2}}},
    "coupled": {"parallel": {"use": "coupled", "ep": 2, "shard": "all", "expert_shard": "all"}},
    "tied, recomputed": {
        "model": {**MODEL, "tie_embeddings": True},
        "parallel": ALL,
        "memory": [{"use": "recompute", "regions": ["layer"]}],
    },
    "codes": {
        "parallel": {"dense": {"shard": 2}, "experts": {"ep": 2, "shard": 2}},
        "precision": CODES,
        "model": {**MODEL, "dim": 256, "dense_dim": 256, "expert_dim": 256, "shared_expert_dim": 256},
    },
    "merged": {"parallel": ALL, "pipeline": {"use": "merged"}},
    "experts alone, zero-bubble": {
        "parallel": {"pp": 2, "experts": {"shard": 2}},
        "pipeline": {"use": "zero-bubble"},
        "model": FOUR_LAYERS,
    },
    **{
        schedule: {"parallel": STAGES, "pipeline": {"use": schedule}, "model": FOUR_LAYERS}
        for schedule in ("1f1b", "zero-bubble", "dualpipe-v")
    },
}
MICRO_BATCHES = 4
ADAM = {"use": "adamw", "eps": 1e-3}
"""Its steps are proportional to small gradients, so that they show no rounding."""


def tree(sharded: str, dense: int, experts: int) -> dict[str, Any]:
    """Return a spec of four ranks whose meshes have these stages of ZeRO, where ranks shard them."""
    parts = {"model": MODEL, "precision": {"use": "fp32"}, **deepcopy(SHARDED[sharded])}
    parallel = parts["parallel"]
    if parallel.get("use") == "coupled":
        parallel["zero"] = dense
    for side, zero in (("dense", dense), ("experts", experts)):
        if "shard" in parallel.get(side, {}):
            parallel[side]["zero"] = zero
    tokens = MICRO_BATCHES * SMALL["train"]["seq_len"] * 4 // parallel.get("pp", 1)
    train = {**SMALL["train"], "micro_batch": 1, "tokens_per_step": tokens, "optimizer": ADAM}
    return {**SMALL, **parts, "train": train}


_trained: dict[tuple[str, int, int], list[Run]] = {}


def trained(pool: RankPool, sharded: str, dense: int, experts: int) -> list[Run]:
    """Return the runs of two steps of all ranks. Each is trained once."""
    key = sharded, dense, experts
    if key not in _trained:
        _trained[key] = pool.run(short_run, 4, tree(*key), 2)
    return _trained[key]


@pytest.mark.parametrize(
    ("sharded", "zeros"),
    [
        pytest.param(sharded, zeros, marks=() if (sharded, zeros) in chosen else pytest.mark.deep)
        for chosen in [(("hybrid", (2, 3)), ("zero-bubble", (3, 2)))]
        for sharded, zeros in product(SHARDED, ((2, 2), (2, 3), (3, 2)))
    ],
)
def test_weights_gathered_once_a_step_train_the_same_bits(pool: RankPool, sharded: str, zeros: tuple[int, int]) -> None:
    """A copy that is older than the update would show in the losses of the second step."""
    pairs = zip(trained(pool, sharded, *zeros), trained(pool, sharded, 3, 3), strict=True)
    for found, wanted in pairs:
        assert found.results == wanted.results
        assert all(torch.equal(found.last[name], wanted.last[name]) for name in wanted.last)


@pytest.mark.parametrize(
    ("sharded", "zeros"),
    [
        pytest.param(sharded, zeros, marks=() if (sharded, zeros) in chosen else pytest.mark.deep)
        for chosen in [(("hybrid", (3, 1)), ("zero-bubble", (1, 2)))]
        for sharded, zeros in product(SHARDED, ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1)))
    ],
)
def test_gradients_reduced_once_a_step_train_alike(pool: RankPool, sharded: str, zeros: tuple[int, int]) -> None:
    found, wanted = trained(pool, sharded, *zeros), trained(pool, sharded, 3, 3)
    if SHARDED[sharded].get("precision"):
        for got, other in zip(found[0].results, wanted[0].results, strict=True):
            assert got.loss == pytest.approx(other.loss, rel=1e-5)
            assert got.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        return
    whole = Run(
        results=wanted[0].results,
        first={name: tensor for run in wanted for name, tensor in run.first.items()},
        last={name: tensor for run in wanted for name, tensor in run.last.items()},
        state={},
    )
    assert deviation(found, whole).alike


def of_steps(spec: dict[str, Any]) -> tuple[Counter[str], Counter[str], int, bool]:
    """Return how often each unit is gathered in a second step and in an evaluation of two batches, how many micro-batches
    there are, and whether nothing stays gathered.
    """
    model, assembly, layout, shared = open_model(LayerCase(tokens=(1,) * 4, parts=spec))
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    engine = Engine.of(model, optimizer, layout, assembly.spec.train)
    batches = global_batch(assembly, layout, 0)
    engine.step(batches, 1e-3, lambda *_: nullcontext())
    with gathers_counted() as in_step:
        engine.step(batches, 1e-3, lambda *_: nullcontext())
    with gathers_counted() as in_evaluation:
        evaluate(model, batches[:2], layout)
    return in_step, in_evaluation, len(batches), all(isinstance(each, DTensor) for each in model.parameters())


@pytest.mark.parametrize("sharded", quick(("all", "merged", "1f1b", "zero-bubble"), "zero-bubble"))
@pytest.mark.parametrize("zeros", [(2, 3), pytest.param((1, 1), marks=pytest.mark.deep)], ids=str)
def test_a_unit_of_zero_1_or_2_is_gathered_once_a_step(pool: RankPool, sharded: str, zeros: tuple[int, int]) -> None:
    """So it is once an evaluation, and nothing stays gathered behind either."""
    for in_step, in_evaluation, micro_batches, is_sharded in pool.run(of_steps, 4, tree(sharded, *zeros)):
        assert is_sharded
        experts = {name for name in in_step if name.endswith("moe.experts")}
        others = in_step.keys() - experts
        assert len(experts) >= 1
        assert len(others) > len(experts)
        assert {in_step[name] for name in others} == {1}
        assert {in_evaluation[name] for name in others if in_evaluation[name]} == {1}
        if zeros[1] == 3:
            assert all(in_step[name] >= micro_batches for name in experts)
            assert all(in_evaluation[name] == 2 for name in experts)
        else:
            assert {in_step[name] for name in experts} == {in_evaluation[name] for name in experts} == {1}


def reductions(spec: dict[str, Any]) -> int:
    """Return how often this rank reduces gradients in a step."""
    work = measure_here(fake_assembly(spec, 4), micro_batches=MICRO_BATCHES).work
    return sum(one.layers * done.times for one in work for done in one.transfers if done.kind == "reduce-scatter")


@pytest.mark.parametrize(
    ("sharded", "like"), [pytest.param("all", "all", marks=pytest.mark.deep), ("zero-bubble", "1f1b")]
)
def test_each_unit_of_zero_1_reduces_once_a_step(pool: RankPool, sharded: str, like: str) -> None:
    """Where weight gradients have passes of their own, FSDP else reduces after both."""
    once = pool.run(reductions, 4, tree(sharded, 1, 1))
    assert all(once)
    assert [MICRO_BATCHES * count for count in once] == pool.run(reductions, 4, tree(like, 2, 2))


def test_each_unit_of_a_played_step_reduces_as_its_own_stage_says(pool: RankPool) -> None:
    """The unit around all others is dense: it adds up whole while experts reduce after each pass, or the reverse."""
    counts = {zeros: pool.run(reductions, 4, tree("1f1b", *zeros)) for zeros in product((1, 2), repeat=2)}
    for both_once, experts_often, dense_often, both_often in zip(*counts.values(), strict=True):
        assert both_once < experts_often < both_often
        assert both_once < dense_often < both_often
        assert experts_often + dense_often == both_once + both_often


def added_up_by_autograd(spec: dict[str, Any]) -> tuple[int, list[tuple[int, ...]]]:
    """Return the number of gathered matrices, and the shapes of those whose gradients autograd adds up."""
    model, assembly, layout, _ = open_model(LayerCase(tokens=(1,) * 4, parts=spec))
    found = list[tuple[int, ...]]()
    with (
        kept(model),
        added_up_unsharded(model) as (gathered, _),
        shared_by_micro_batches(model.parameters(), gathered=gathered),
    ):
        matrices = [weight for weight in gathered if weight.dim() > 1]
        for weight in matrices:
            weight.register_post_accumulate_grad_hook(
                lambda one: found.extend([tuple(one.shape)] * (one.grad is not None))
            )
        model(global_batch(assembly, layout, 0)[0]).objective.backward()
    return len(matrices), found


def test_products_and_lookups_add_to_the_sums_of_whole_gradients(pool: RankPool) -> None:
    for matrices, by_autograd in pool.run(added_up_by_autograd, 4, tree("all, bf16", 1, 1)):
        assert matrices > 10
        assert not by_autograd


def gradients_of(spec: dict[str, Any]) -> tuple[list[torch.dtype], dict[str, torch.Tensor]]:
    """Return the dtypes in which whole gradients are before they are reduced, and this rank's shards of gradients."""
    model, assembly, layout, shared = open_model(LayerCase(tokens=(1,) * 4, parts=spec))
    engine = Engine.of(model, torch.optim.SGD(model.parameters(), lr=0.0), layout, assembly.spec.train)
    batches = global_batch(assembly, layout, 0)
    dtypes = set[torch.dtype]()

    def note_sums(*_: Any) -> AbstractContextManager[None]:
        sums = [whole.grad for whole in accumulators(model).values()]
        dtypes.update(whole.dtype for whole in sums if whole is not None)
        return nullcontext()

    engine.step(batches, 0.0, note_sums)
    shared.close()
    return [*dtypes], {name: local(each.grad).clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("sharded", quick(("all, bf16", "hybrid", "codes", "merged", "zero-bubble"), "all, bf16"))
def test_whole_gradients_in_bf16_are_reduced_in_fp32_and_are_nearly_those_of_fp32(pool: RankPool, sharded: str) -> None:
    spec = tree(sharded, 1, 1)
    narrow_spec = {**spec, "train": {**spec["train"], "main_gradients": "bfloat16"}}
    pairs = zip(pool.run(gradients_of, 4, narrow_spec), pool.run(gradients_of, 4, spec), strict=True)
    for (narrow_dtypes, narrow), (wide_dtypes, wide) in pairs:
        assert narrow_dtypes == [torch.bfloat16]
        assert wide_dtypes == [torch.float32]
        assert {gradient.dtype for gradient in narrow.values()} == {torch.float32}
        for name, gradient in wide.items():
            assert (narrow[name] - gradient).norm() <= 0.02 * gradient.norm(), name
        assert any(not torch.equal(narrow[name], gradient) for name, gradient in wide.items())


@pytest.mark.parametrize("zero", [2, pytest.param(1, marks=pytest.mark.deep)])
def test_weights_gathered_once_are_held_in_the_dtype_of_products(zero: int) -> None:
    """The experts of a rank, in bf16: two bytes an element."""
    measured = measure(fake_assembly(tree("all, bf16", 3, zero), 4), micro_batches=2)
    sizes = MODEL
    of_an_expert = 3 * sizes["dim"] * sizes["expert_dim"]
    moe_layers = sizes["num_layers"] - sizes["num_dense_layers"]
    assert measured.peak_held["operands"] == 2 * moe_layers * sizes["num_experts"] // 2 * of_an_expert
