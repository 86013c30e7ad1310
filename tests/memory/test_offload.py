"""Offload in a model: no bit changes, offloaded tensors free device memory, and buffers are returned."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchers import DISPATCHERS
from memory_cases import PRECISIONS, Allocations, assert_same, model_case, offload, recompute, run
from moefw.plugins.memory.offload.pool import Pool, open_pool
from moefw.testing.layer_case import LayerCase, build_layer, received
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model
from moefw.testing.suites.watch import same_bits
from moefw.testing.training import SMALL, short_run
from pairwise import each_value

CPU = torch.device("cpu")
REGIONS = (
    "layer",
    "attn_norm",
    "attention",
    "core_attn",
    "router",
    "experts",
    "expert_fc2",
    "shared_experts",
    "dense_mlp",
)


@pytest.mark.parametrize(
    ("treated", "dispatch", "precision", "in_flight"),
    each_value(
        [*(("grouped", region) for region in REGIONS), ("loop", "expert_fc1"), ("loop", "moe_act")],
        ("alltoall", "hybridep"),
        PRECISIONS,
        (False, True),
    ),
)
def test_no_bit_changes_in_any_region(
    pool: RankPool, treated: tuple[str, str], dispatch: str, precision: str, in_flight: bool
) -> None:
    gemm, region = treated
    parts = {"gemm": {"use": gemm}, "dispatch": DISPATCHERS[dispatch], "precision": PRECISIONS[precision]}
    plain = run(pool, [], in_flight=in_flight, **parts)
    assert_same(plain, run(pool, [offload(region)], in_flight=in_flight, **parts))


NESTED = {
    "offload in recompute": [recompute("layer"), offload("experts", "router")],
    "recompute in offload": [offload("layer"), recompute("experts", "attention")],
    "offload in offload": [offload("layer", "experts", "moe_act")],
    "activation offloaded in recompute": [recompute("experts"), offload("moe_act")],
    "activation recomputed in offload": [offload("experts"), recompute("moe_act")],
    "three deep": [recompute("layer", "moe_act"), offload("experts")],
    "three deep, turned": [offload("layer", "moe_act"), recompute("experts")],
}


@pytest.mark.parametrize(("name", "precision", "in_flight"), each_value(NESTED, PRECISIONS, (False, True)))
def test_no_bit_changes_where_regions_lie_in_each_other(
    pool: RankPool, name: str, precision: str, in_flight: bool
) -> None:
    parts = {"gemm": {"use": "loop"}, "precision": PRECISIONS[precision]}
    plain = run(pool, [], in_flight=in_flight, **parts)
    assert_same(plain, run(pool, NESTED[name], in_flight=in_flight, **parts))


def test_no_bit_changes_where_parameters_are_shared_out(pool: RankPool) -> None:
    tree = {**SMALL, "parallel": {"dense": {"shard": "all"}, "experts": {"shard": "all"}}}
    plain = pool.run(short_run, 2, tree, 3)
    moved = pool.run(short_run, 2, {**tree, "memory": [offload(*REGIONS)]}, 3)
    assert [result.loss for result in moved[0].results] == [result.loss for result in plain[0].results]
    assert all(same_bits(plain[1].last[name], moved[1].last[name]) for name in plain[1].last)


def test_no_bit_changes_on_a_disk(pool: RankPool, tmp_path: Path) -> None:
    policy = offload(*REGIONS, to="nvme", path=str(tmp_path))
    for in_flight in (False, True):
        assert_same(run(pool, [], in_flight=in_flight), run(pool, [policy], in_flight=in_flight))
    assert os.listdir(tmp_path) == []


@contextmanager
def opened(memory: Sequence[Mapping[str, Any]], **parts: Any) -> Iterator[tuple[Callable[[], Tensor], Pool]]:
    """Yield a function that runs one micro-batch forward on one rank and returns the loss, and the pool."""
    model, assembly, layout, shared = open_model(model_case(1, memory, **parts))
    batch = replace(global_batch(assembly, layout, 0)[0], loss_scale=torch.tensor(1.0))
    pool: Pool = shared.get(("offload", "host", None), lambda: pytest.fail("no pool was opened"))
    yield lambda: model(batch).loss_sum, pool
    shared.close()


def test_layers_and_micro_batches_take_each_others_buffers() -> None:
    with opened([offload("layer", "experts")]) as (forward, pool):
        forward().backward()
        first = pool.num_buffers
        assert 0 < first == pool.num_idle
        for _ in range(4):
            forward().backward()
        assert pool.num_buffers == first == pool.num_idle
        one, other = forward(), forward()
        assert pool.num_buffers == 2 * first
        assert pool.num_idle == 0
        one.backward()
        assert pool.num_idle >= first
        other.backward()
        one, other = forward(), forward()
        one.backward()
        other.backward()
        assert pool.num_buffers == 2 * first == pool.num_idle
        assert not pool.copies


def test_a_graph_that_dies_gives_its_buffers_back() -> None:
    with opened([offload("layer")]) as (forward, pool):
        gc.disable()
        try:
            loss = forward()
            assert pool.num_idle == 0 < pool.num_buffers
            del loss
            assert pool.num_idle == pool.num_buffers
        finally:
            gc.enable()


def test_evaluation_without_gradients_moves_nothing() -> None:
    with opened([offload("layer")]) as (forward, pool):
        with torch.no_grad():
            forward()
        assert pool.num_buffers == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_device_is_relieved_of_what_experts_save(precision: str) -> None:
    live, moved = {}, 0
    for memory in ([], [offload("experts")]):
        case = LayerCase(tokens=(64,), parts={"precision": PRECISIONS[precision], "memory": memory})
        (layer, shared), batch = build_layer(case), received(case)
        batch = replace(batch, rows_RD=batch.rows_RD.detach().requires_grad_())
        pool: Pool = shared.get(("offload", "host", None), lambda: open_pool(CPU, None))
        buffers: set[StorageWeakRef] = set()
        pool._allocate = remembering(buffers)
        with Allocations(buffers) as seen:
            out_RD = layer._experts(batch)
        gc.collect()
        live[len(memory)] = seen.live_bytes()
        moved = sum(span.nbytes for span in pool.copies if span.storage in seen.made)
        out_RD.sum(dtype=torch.float32).backward()
        shared.close()
    assert moved > 0
    assert live[0] - live[1] == moved


def remembering(buffers: set[StorageWeakRef]) -> Callable[[int], Tensor]:
    def allocate(nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        buffers.add(StorageWeakRef(memory.untyped_storage()))
        return memory

    return allocate
