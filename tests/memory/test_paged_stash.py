"""Paged stash in whole models: no bit changes, only valid rows stay, and a step with rows without a page is repeated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import moefw
from memory_cases import PRECISIONS, Allocations, assert_same, model_case, num_taken, offload, recompute, run
from moefw.compose.build import Shared
from moefw.planner import ledger
from moefw.plugins.memory.paged_stash import PagedStash
from moefw.plugins.memory.paged_stash.stash import Stash
from moefw.runtime.memory.static_rows import UNSAVED
from moefw.testing.poisoned import poisoned_memory
from moefw.testing.pool import RankPool
from moefw.testing.suites.memory import MemorySuite
from moefw.testing.suites.memory_case import Observed, observed
from moefw.testing.suites.runs import global_batch, open_model, train, whole_model
from moefw.testing.suites.watch import same_bits
from pairwise import each_value, quick

CAPACITY = 24.0
BUDGETED = {
    "hybridep": {"use": "hybridep", "backend": "torch", "rank_capacity": CAPACITY, "on_overflow": "rerun"},
    "alltoall": {"use": "alltoall", "rank_capacity": CAPACITY, "on_overflow": "rerun"},
}
BUDGET = BUDGETED["hybridep"]
FINE = ("expert_fc1", "expert_fc2")
BALANCED = {"num_dense_layers": 0, "num_layers": 3, "dim": 32, "expert_dim": 64}


def stash(*regions: str, **options: Any) -> dict[str, Any]:
    return {"use": "paged-stash", "regions": list(regions), "page_rows": 16, "factor": CAPACITY, **options}


CASES = {
    "experts": [stash("experts")],
    "both GEMMs": [stash(*FINE)],
    "one of them": [stash("expert_fc2")],
    "two stashes": [stash("expert_fc1"), stash("expert_fc2", page_rows=2)],
    "spilled": [stash("experts", factor=0.1, spill="host")],
    "a recomputed layer around": [recompute("layer"), stash(*FINE)],
    "recomputed experts around": [recompute("experts"), stash("expert_fc1")],
    "a recomputed GEMM inside": [stash("experts"), recompute("expert_fc1")],
    "recomputed rows": [recompute("dispatch", "router"), stash(*FINE)],
    "an offloaded layer around": [offload("layer"), stash("experts")],
    "offloaded experts around": [offload("experts"), stash("expert_fc2")],
    "an offloaded GEMM inside": [stash("experts"), offload("expert_fc1")],
}


@cache
def untreated(precision: str, in_flight: bool) -> Observed:
    with poisoned_memory():
        return observed(model_case(1, [], dispatch=BUDGET, precision=PRECISIONS[precision]), in_flight, 1.0)


@pytest.mark.parametrize(("case", "precision"), each_value(CASES, PRECISIONS))
def test_no_bit_changes(case: str, precision: str) -> None:
    parts = {"dispatch": BUDGET, "precision": PRECISIONS[precision]}
    for in_flight in (False, True):
        with poisoned_memory():
            treated = observed(model_case(1, CASES[case], **parts), in_flight, 1.0)
        assert_same([untreated(precision, in_flight)], [treated])
        assert sum(value for name, value in treated.values.items() if UNSAVED in name) == 0


@pytest.mark.parametrize("precision", quick(PRECISIONS, "fp8-blockwise"))
def test_no_bit_changes_on_two_ranks(pool: RankPool, precision: str) -> None:
    parts = {"dispatch": BUDGET, "precision": PRECISIONS[precision]}
    for in_flight in (False, True):
        plain = run(pool, [], in_flight=in_flight, **parts)
        assert_same(plain, run(pool, CASES["both GEMMs"], in_flight=in_flight, **parts))


@contextmanager
def opened(memory: Sequence[Mapping[str, Any]], **parts: Any) -> Iterator[tuple[Callable[..., Any], list[Stash]]]:
    """Yield a function that runs one micro-batch forward on one rank, and the stashes."""
    layer_case = whole_model(1, parts={"dispatch": BUDGET, "memory": memory, **parts}, plugins=())
    model, assembly, layout, shared = open_model(layer_case)
    batch = replace(global_batch(assembly, layout, 0)[0], loss_scale=torch.tensor(1.0))
    yield lambda **more: model(replace(batch, **more)), stashes(shared)
    shared.close()


def stashes(shared: Shared) -> list[Stash]:
    return [held for held in shared._held.values() if isinstance(held, Stash)]


def test_pages_come_back_and_are_used_again() -> None:
    with opened([stash("experts")]) as (forward, (held,)):
        for _ in range(3):
            output = forward()
            assert num_taken(held) > 0
            output.loss_sum.backward()
            del output
            assert num_taken(held) == 0
        nbytes = held.nbytes
        one, other = forward(), forward()
        assert held.nbytes == 2 * nbytes
        one.loss_sum.backward()
        other.loss_sum.backward()
        for _ in range(2):
            one, other = forward(), forward()
            other.loss_sum.backward()
            one.loss_sum.backward()
        assert held.nbytes == 2 * nbytes
        assert num_taken(held) == 0


def test_a_graph_that_dies_gives_its_pages_back() -> None:
    with opened([stash("experts")]) as (forward, (held,)):
        gc.disable()
        try:
            output = forward()
            assert num_taken(held) > 0
            del output
            assert num_taken(held) == 0
        finally:
            gc.enable()


def test_evaluation_and_a_second_run_stash_nothing() -> None:
    with opened([stash("experts")]) as (forward, (held,)):
        with torch.no_grad():
            outputs = [forward(), forward(dropless=True)]
        outputs.append(forward(dropless=True))
        outputs[-1].loss_sum.backward()
        assert not held.pools
        assert all(UNSAVED not in layer.stats for output in outputs for layer in output.layers.values())


def test_a_layer_that_runs_again_for_backward_takes_no_page() -> None:
    with opened([recompute("layer"), stash("experts")]) as (forward, (held,)):
        output = forward()
        pools = [pool for pools in held.pools.values() for pool in pools]
        taken = [pool.pages.counters[:, 0].tolist() for pool in pools]
        output.loss_sum.backward()
        assert sum(map(sum, taken)) > 0
        assert taken == [pool.pages.counters[:, 0].tolist() for pool in pools]


def test_rows_that_travel_again_need_no_page() -> None:
    with opened([recompute("dispatch"), stash("expert_fc1")]) as (forward, (held,)):
        output = forward()
        assert not held.pools
        output.loss_sum.backward()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_pool_is_no_larger_than_the_valid_rows(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With balanced routing and pages of 64: 1000 tokens of 2 experts each, 2000 valid rows of 6000."""
    parts = {
        "routing": {"use": "forced"},
        "precision": PRECISIONS[precision],
        "dispatch": {**BUDGET, "rank_capacity": 3.0},
    }
    live, pools, valid = {}, [], 0
    for name, memory in (("kept", []), ("stashed", [stash("experts", page_rows=64, factor=1.0)])):
        layer_case = whole_model(1, parts={"memory": memory, **parts}, plugins=(), micro_batch=4, sizes=BALANCED)
        model, _, _, shared = open_model(layer_case)
        ids = torch.randint(61, (4, 251), generator=torch.Generator().manual_seed(0))
        batch = moefw.Batch(ids_BS=ids[:, :-1], labels_BS=ids[:, 1:], loss_scale=torch.tensor(1.0))
        model(batch).loss_sum.backward()
        with Allocations() as seen:
            output = model(batch)
        live[name] = seen.live_bytes()
        assert sum(float(layer.stats.get(UNSAVED, 0)) for layer in output.layers.values()) == 0
        held = [(kind, pool) for one in stashes(shared) for kind, each in one.pools.items() for pool in each]
        pools += [pool.pages.near.nbytes for _, pool in held]
        valid += sum(BALANCED["num_layers"] * 2000 * kind.width * kind.dtype.itemsize for kind, _ in held)
        del output, held
        shared.close()
    with capsys.disabled():
        print(f"\n{precision}: pool / valid bytes {sum(pools) / valid:.4f}, static / valid 3")
    assert len(pools) == 2
    assert valid <= sum(pools) <= 1.05 * valid
    assert live["kept"] - live["stashed"] >= 0.99 * 3 * valid


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp8-blockwise", {}),
        ("fp32", {"factor": 9.0}),
        *(pytest.param(precision, {}, marks=pytest.mark.deep) for precision in ("fp32", "bf16")),
        pytest.param("fp32", {"factor": 1.0}, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_the_ledger_counts_the_pages_that_there_are(precision: str, options: Mapping[str, Any]) -> None:
    parts = {
        "routing": {"use": "forced"},
        "precision": PRECISIONS[precision],
        "dispatch": {**BUDGET, "rank_capacity": 3.0},
        "memory": [stash("experts", page_rows=8, **options)],
    }
    sizes = {**BALANCED, "num_layers": 1}
    model, assembly, layout, shared = open_model(whole_model(1, parts=parts, plugins=(), sizes=sizes))
    model(global_batch(assembly, layout, 0)[0])
    found = ledger(assembly)
    assert not found.unknown
    pages = sum(held.nbytes for held in stashes(shared))
    assert 0 < found.totals["stashed"] - pages < pages / 50, "beside pages, the list of those that are free"
    shared.close()


@pytest.mark.parametrize(("precision", "use"), each_value(PRECISIONS, BUDGETED))
def test_an_overflow_is_seen_and_the_step_runs_again(precision: str, use: str) -> None:
    """The losses and weights are those of a dropless run, and those of a run that keeps everything."""
    budget = BUDGETED[use]
    dropless = {name: value for name, value in budget.items() if name in ("use", "backend")}
    parts = {"precision": PRECISIONS[precision], "dispatch": budget}
    plain = train(model_case(1, [], **{**parts, "dispatch": dropless}), 2)
    kept = train(model_case(1, [], **parts), 2)
    few = train(model_case(1, [stash("experts", factor=0.1)], **parts), 2)
    assert all(result.counts[UNSAVED] > 0 for result in few.results)
    assert all(result.counts["overflow"] == 0 for result in few.results)
    for other in (plain, kept):
        assert [result.loss for result in few.results] == [result.loss for result in other.results]
        assert [result.grad_norm for result in few.results] == [result.grad_norm for result in other.results]
        assert all(same_bits(few.last[name], other.last[name]) for name in other.last)


@pytest.mark.parametrize("use", BUDGETED)
def test_an_overflow_on_one_rank_runs_the_step_again_on_all(pool: RankPool, use: str) -> None:
    """A pool that is just large enough for a balanced load, and routing that is not."""
    biased = {"use": "topk", "score": "softmax"}
    parts = {"dispatch": BUDGETED[use], "routing": biased}
    few = pool.run(train, 2, model_case(2, [stash("experts", factor=1.0, page_rows=1)], **parts), 2)
    plain = pool.run(train, 2, model_case(2, [], **parts), 2)
    for one, other in zip(few, plain, strict=True):
        assert one.results[0].counts[UNSAVED] > 0
        assert [result.loss for result in one.results] == [result.loss for result in other.results]
        assert all(same_bits(one.last[name], other.last[name]) for name in other.last)


@pytest.mark.parametrize(
    ("memory", "parts", "says"),
    [
        ([stash("experts")], {"dispatch": {"use": "alltoall"}}, "paged-stash needs a budget of rows"),
        ([stash("experts")], {"dispatch": {"use": "alltoall"}}, "run again; nothing here offers that"),
        ([stash("experts")], {"dispatch": {"use": "hybridep", "backend": "torch"}}, "dispatch.rank_capacity"),
        (
            [stash("experts")],
            {"dispatch": {**BUDGET, "on_overflow": "drop"}},
            "a step whose rows find no page is run again; nothing here offers that",
        ),
        (
            [stash("experts")],
            {"gemm": {"use": "loop"}},
            "region experts to allow stash: only a GEMM that computes on all",
        ),
        ([stash("attention")], {}, "region attention to allow stash"),
        ([stash("experts", page_rows=48)], {}, "page_rows is 48; it must be a power of two"),
        ([stash("experts", page_rows=0)], {}, "page_rows"),
        ([stash("experts", factor=0.0)], {}, "factor"),
        ([stash("experts", spill="nvme")], {}, "'nvme'"),
        ([stash("experts"), recompute("experts")], {}, "both treat region 'experts'"),
    ],
)
def test_what_cannot_be_is_refused(memory: Any, parts: Mapping[str, Any], says: str) -> None:
    with pytest.raises(moefw.MoefwError) as caught:
        model_case(1, memory, **{"dispatch": BUDGET, **parts}).assemble()
    assert says in str(caught.value)


class TestPagedStash(MemorySuite):
    plugin = PagedStash
    options = {"factor": CAPACITY, "page_rows": 16}
    parts = {"dispatch": BUDGET}


@pytest.mark.deep
class TestPagedStashSpilled(MemorySuite):
    plugin = PagedStash
    options = {"factor": 0.25, "page_rows": 4, "spill": "host"}
    parts = {"dispatch": BUDGET, "precision": {"use": "bf16"}}
