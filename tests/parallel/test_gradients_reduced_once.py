"""With ``train.reduce_gradients: step`` FSDP reduces gradients once a step, and they are those of each micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

from fake_steps import fake_assembly
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.runtime.parallel.unsharded_gradients import added_up_unsharded
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model
from moefw.testing.training import SMALL, short_run
from moefw.training.measured import measure_here
from pairwise import quick

ALL = {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
BLOCKWISE = {"use": "fp8-blockwise", "backend": "emulate"}
SHARDED: dict[str, dict[str, Any]] = {
    "all": {"parallel": ALL},
    "all, fp32": {"parallel": ALL, "precision": {"use": "fp32"}},
    "hybrid": {"parallel": {"dense": {"shard": 2}, "experts": {"shard": 2}}},
    "tied, recomputed": {
        "model": {**SMALL["model"], "vocab_size": 64, "tie_embeddings": True},
        "parallel": ALL,
        "memory": [{"use": "recompute", "regions": ["layer"]}],
    },
    "codes": {
        "parallel": {"dense": {"shard": 2}, "experts": {"ep": 2, "shard": 2}},
        "precision": {**BLOCKWISE, "primary_weights": "fp8", "keep_bf16": ["*.attention"]},
        "model": {**SMALL["model"], "dim": 256, "dense_dim": 256, "expert_dim": 256, "shared_expert_dim": 256},
    },
    **{
        schedule: {
            "parallel": {"pp": 2, "dense": {"shard": "all"}, "experts": {"shard": "all"}},
            "pipeline": {"use": schedule},
            "model": {**SMALL["model"], "vocab_size": 64, "num_layers": 4},
        }
        for schedule in ("1f1b", "zero-bubble", "dualpipe-v")
    },
}
MICRO_BATCHES = 4
ADAM = {"use": "adamw", "eps": 1e-3}
"""Its steps are proportional to small gradients, so that they show no rounding."""


def tree(sharded: str, reduce_gradients: str) -> dict[str, Any]:
    parts = {"model": {**SMALL["model"], "vocab_size": 64}, "precision": {"use": "bf16"}, **SHARDED[sharded]}
    tokens = MICRO_BATCHES * SMALL["train"]["seq_len"] * (2 if "pp" in parts["parallel"] else 4)
    train = {**SMALL["train"], "micro_batch": 1, "tokens_per_step": tokens, "optimizer": ADAM}
    return {**SMALL, **parts, "train": {**train, "reduce_gradients": reduce_gradients}}


def trained(pool: RankPool, *given: Any) -> Any:
    return pool.run(short_run, 4, tree(*given), 3)[0]


@pytest.mark.parametrize("sharded", quick(SHARDED, "hybrid", "zero-bubble"))
def test_training_is_that_of_gradients_reduced_after_each_micro_batch(pool: RankPool, sharded: str) -> None:
    once, each = (pool.run(short_run, 4, tree(sharded, when), 3)[0] for when in ("step", "micro_batch"))
    for got, wanted in zip(once.results, each.results, strict=True):
        assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


def reductions(spec: dict[str, Any]) -> int:
    """Return how often this rank reduces gradients in a step."""
    work = measure_here(fake_assembly(spec, 4), micro_batches=MICRO_BATCHES).work
    return sum(one.layers * done.times for one in work for done in one.transfers if done.kind == "reduce-scatter")


def added_up_by_autograd(spec: dict[str, Any]) -> tuple[int, list[tuple[int, ...]]]:
    """Return the number of gathered matrices, and the shapes of those whose gradients autograd adds up."""
    model, assembly, layout, _ = open_model(LayerCase(tokens=(1,) * 4, parts=spec))
    found = list[tuple[int, ...]]()
    with (
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
    for matrices, by_autograd in pool.run(added_up_by_autograd, 4, tree("all", "step")):
        assert matrices > 10
        assert not by_autograd


@pytest.mark.parametrize(
    ("sharded", "like"), [pytest.param("all", "all", marks=pytest.mark.deep), ("zero-bubble", "1f1b")]
)
def test_each_unit_reduces_once_a_step(pool: RankPool, sharded: str, like: str) -> None:
    """Where weight gradients have passes of their own, FSDP else reduces after both."""
    once = pool.run(reductions, 4, tree(sharded, "step"))
    assert all(once)
    assert [MICRO_BATCHES * count for count in once] == pool.run(reductions, 4, tree(like, "micro_batch"))
