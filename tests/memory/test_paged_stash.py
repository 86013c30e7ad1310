"""Paged stash: no bit changes, only valid rows stay, pages are returned however a graph ends, and a step with rows without a page is repeated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefw
from memory_cases import PRECISIONS, Allocations, assert_same, model_case, offload, recompute, run
from moefw.compose.build import Shared
from moefw.core.stages import ExpertBatch
from moefw.planner import ledger
from moefw.plugins.memory.paged_stash import PagedStash
from moefw.plugins.memory.paged_stash.policy import StashPolicy
from moefw.plugins.memory.paged_stash.stash import CudaOrder, PlainOrder, Stash
from moefw.runtime.memory.static_rows import UNSAVED, StaticRows, computing_on
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


def num_taken(held: Stash) -> int:
    """Return the number of pages taken, after dead tensors have returned theirs."""
    held.settle()
    pools = [pool for pools in held.pools.values() for pool in pools]
    return sum(
        len(pool.pages.ring) - int((pool.pages.counters[:, 1] - pool.pages.counters[:, 0]).sum()) for pool in pools
    )


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


def test_layers_share_a_pool() -> None:
    """Two layers have pages for two balanced loads: one may use more than its own."""
    policy, held = stashing(share=0.5, layers=2)
    outs, reports = zip(*(call(policy, num_valid=valid) for valid in (12, 2)), strict=True)
    assert [float(report) for report in reports] == [0.0, 0.0]
    assert num_taken(held) == 4
    del outs
    assert num_taken(held) == 0


def stashing(
    *, share: float = 1.0, layers: int = 1, spill: bool = False, page_rows: int = 4
) -> tuple[Callable[..., Any], Stash]:
    """Return a region that saves its argument, and the stash behind it."""
    held = Stash(PlainOrder(), page_rows=page_rows, spill=spill, pinned=False)
    policy = StashPolicy(held, share=share)
    for _ in range(layers):
        region = policy.wrap("region", torch.sin)
    return region, held


def call(
    region: Callable[..., Any], *, num_valid: int, x: Tensor | None = None, num_rows: int = 16
) -> tuple[Any, Tensor]:
    """Return a region's result, and the number of unsaved rows that it reports, for rows of which ``num_valid`` are valid."""
    x = torch.randn(num_rows, 8, requires_grad=True) if x is None else x
    ends_e = torch.tensor([1, num_valid], dtype=torch.int32)
    rows = StaticRows(ExpertBatch(rows_RD=x, row_weights_R=x[:, 0], counts_e=ends_e, offsets_e=ends_e))
    with computing_on(rows):
        out = region(x)
    return out, rows.stats[UNSAVED]


@pytest.mark.parametrize("num_valid", [0, 1, 4, 7, 16])
@pytest.mark.parametrize("like", [lambda x: x, lambda x: x.T.contiguous().T, lambda x: torch.cat([x, x], 1)[:, 4:12]])
def test_valid_rows_come_back_with_their_strides(like: Callable[[Tensor], Tensor], num_valid: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        region, held = stashing()
        x = like(torch.randn(16, 8, dtype=dtype)).requires_grad_()
        out, unsaved = call(region, num_valid=num_valid, x=x)
        assert num_taken(held) == -(-num_valid // 4)
        back = out.grad_fn._saved_self
        assert same_bits(back[:num_valid], x[:num_valid])
        assert back.stride() == x.stride()
        assert unsaved == 0


def test_rows_past_the_valid_ones_are_not_read() -> None:
    region, _ = stashing()
    x = torch.full((16, 8), torch.nan)
    x[:5] = 1.0
    out, _ = call(region, num_valid=5, x=x.requires_grad_())
    with poisoned_memory():
        back = out.grad_fn._saved_self
    assert same_bits(back[:5], x[:5])
    assert back[8:].isnan().all()


def test_what_is_no_row_stays() -> None:
    weight, scales = nn.Parameter(torch.randn(16, 8)), torch.randn(4, 8)
    _, held = stashing()

    def saves(x: Tensor) -> Tensor:
        return (x * weight.T.T).sum() + (weight.mul(2.0)[:4] * scales).sum() + (x[:, 0] * x[:, 1]).sum()

    out, _ = call(StashPolicy(held, share=1.0).wrap("region", saves), num_valid=16)
    assert [(kind.width, len(pools)) for kind, pools in held.pools.items()] == [(8, 1)]
    out.backward()
    assert num_taken(held) == 0


def test_a_graph_may_be_gone_through_twice() -> None:
    region, held = stashing()
    x = torch.randn(16, 8, requires_grad=True)
    out, _ = call(region, num_valid=16, x=x)
    out.sum().backward(retain_graph=True)
    assert num_taken(held) == 4
    once, x.grad = x.grad, None
    out.sum().backward()
    assert same_bits(x.grad, once)
    assert num_taken(held) == 0


def test_a_forward_that_fails_gives_its_pages_back() -> None:
    _, held = stashing()

    def fails(x: Tensor) -> Tensor:
        x.sin()
        raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        call(StashPolicy(held, share=1.0).wrap("region", fails), num_valid=16)
    assert num_taken(held) == 0 < held.nbytes


def test_what_waits_outlives_a_closed_stash() -> None:
    region, held = stashing()
    x = torch.randn(16, 8, requires_grad=True)
    out, _ = call(region, num_valid=16, x=x)
    held.close()
    held.close()
    out.sum().backward()
    assert same_bits(x.grad, x.detach().cos())


def test_more_static_rows_than_before_take_a_pool_of_their_own() -> None:
    region, held = stashing(share=0.5)
    for num_rows in (16, 32, 16, 24):
        assert call(region, num_valid=num_rows // 2, num_rows=num_rows)[1] == 0
    ((few, many),) = held.pools.values()
    assert (len(few.pages.near), len(many.pages.near)) == (2, 4)


def test_groups_that_end_beyond_the_budget_take_no_more_pages_than_it_has() -> None:
    region, held = stashing(layers=3)
    out, unsaved = call(region, num_valid=40)
    assert num_taken(held) == 4
    assert unsaved == 0
    del out
    assert num_taken(held) == 0


@pytest.mark.parametrize(
    ("factor", "capacity", "num_rows", "num_pages"),
    [(1.1, 1.25, 800, 11), (1.0, 1.5, 96, 1), (1.0, 1.5, 97, 2), (2.0, 1.5, 96, 2), (0.01, 1.5, 96, 1)],
)
def test_pages_are_as_many_as_the_factor_says(factor: float, capacity: float, num_rows: int, num_pages: int) -> None:
    """Pages of 64 rows. Rounding of floats adds no page, and there are none beyond the budget."""
    region, held = stashing(share=factor / capacity, page_rows=64)
    call(region, num_valid=1, num_rows=num_rows)
    ((pool,),) = held.pools.values()
    assert len(pool.pages.near) == num_pages


def test_rows_without_a_page_are_counted_and_left_out() -> None:
    region, held = stashing(share=0.5)
    with poisoned_memory():
        x = torch.randn(16, 8, requires_grad=True)
        out, unsaved = call(region, num_valid=13, x=x)
        assert unsaved == 5
        back = out.grad_fn._saved_self
    assert same_bits(back[:8], x[:8])
    assert back[8:].isnan().all()
    del out, back
    assert num_taken(held) == 0
    assert call(region, num_valid=8)[1] == 0


def test_rows_spill_to_the_host_page_by_page() -> None:
    region, held = stashing(share=0.5, layers=2, spill=True)
    xs = [torch.randn(16, 8, requires_grad=True) for _ in range(2)]
    outs, reports = zip(*(call(region, num_valid=15, x=x) for x in xs), strict=True)
    assert [float(report) for report in reports] == [0.0, 0.0]
    ((pool,),) = held.pools.values()
    assert (len(pool.pages.near), len(pool.pages.far)) == (4, 4)
    assert held.nbytes == 4 * 4 * 8 * 4
    for out, x in zip(outs, xs, strict=True):
        assert same_bits(out.grad_fn._saved_self[:15], x[:15])
    del outs, out
    assert num_taken(held) == 0


@pytest.mark.parametrize(("pinned", "kind"), [(False, "host memory"), (True, "page-locked host memory")])
def test_host_memory_that_cannot_be_had_is_told(pinned: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Stash(PlainOrder(), page_rows=4, spill=True, pinned=pinned)
    asked: list[bool] = []

    def none(*_: Any, pin_memory: bool = False, **__: Any) -> Tensor:
        asked.append(pin_memory)
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr(torch, "empty", none)
    words = rf"1024 bytes of {kind} for rows that spill cannot be had \(out of memory\). Leave spill out"
    with pytest.raises(moefw.RunError, match=words):
        held._host_memory(8, 4, 8, dtype=torch.int32)
    assert asked == [pinned]


class FakeStream:
    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append((self.name, other.name))


def test_streams_use_pages_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str]] = []
    lent: list[str] = []
    one, other = FakeStream("one", log), FakeStream("other", log)
    cuda = type("Cuda", (), {"stream": one, "current_stream": lambda self, device: self.stream})()
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: lent.append(stream.name), raising=False)
    held = Stash(CudaOrder(torch.device("cpu"), cuda), page_rows=4, spill=False, pinned=False)
    region = StashPolicy(held, share=1.0).wrap("region", torch.sin)
    out, _ = call(region, num_valid=16)
    held.settle()
    assert log == []
    cuda.stream = other
    out.sum().backward()
    assert log == [("other", "one")]
    assert lent == []
    cuda.stream = one
    call(region, num_valid=16)
    assert log == [("other", "one"), ("one", "other")]
    assert lent == ["one"]


BALANCED = {"num_dense_layers": 0, "num_layers": 3, "dim": 32, "expert_dim": 64}


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
        ([stash("experts")], {"dispatch": {"use": "alltoall"}}, "alltoall offers none"),
        ([stash("experts")], {"dispatch": {"use": "hybridep", "backend": "torch"}}, "dispatch.rank_capacity"),
        (
            [stash("experts")],
            {"dispatch": {**BUDGET, "on_overflow": "drop"}},
            "a step whose rows find no page is run again; hybridep offers none",
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
