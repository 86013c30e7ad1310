"""The pages of one stash: what comes back, what takes a page, what is counted, and what waits for a stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefw
from memory_cases import num_taken
from moefw.core.stages import ExpertBatch
from moefw.plugins.memory.paged_stash.policy import StashPolicy
from moefw.plugins.memory.paged_stash.stash import CudaOrder, PlainOrder, Stash
from moefw.runtime.forward_context import forward_with
from moefw.runtime.memory.static_rows import UNSAVED, StaticRows
from moefw.testing.poisoned import poisoned_memory
from moefw.testing.suites.watch import same_bits


def stashing(
    *,
    share: float = 1.0,
    layers: int = 1,
    spill: bool = False,
    page_rows: int = 4,
    fills_what_is_freed: bool = False,
) -> tuple[Callable[..., Any], Stash]:
    """Return a region that saves its argument, and the stash behind it."""
    held = Stash(PlainOrder(), page_rows=page_rows, spill=spill, pinned=False, fills_what_is_freed=fills_what_is_freed)
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
    with forward_with(static_rows=rows):
        out = region(x)
    return out, rows.stats[UNSAVED]


def test_layers_share_a_pool() -> None:
    """Two layers have pages for two balanced loads: one may use more than its own."""
    policy, held = stashing(share=0.5, layers=2)
    outs, reports = zip(*(call(policy, num_valid=valid) for valid in (12, 2)), strict=True)
    assert [float(report) for report in reports] == [0.0, 0.0]
    assert num_taken(held) == 4
    del outs
    assert num_taken(held) == 0


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


@pytest.mark.parametrize(("fills_what_is_freed", "pages"), [(False, 3 * 4), (True, 4)])
def test_another_pool_has_pages_for_all_layers_or_for_one(fills_what_is_freed: bool, pages: int) -> None:
    """For one where passes are merged: the forward of a layer may come before the backward that frees another."""
    region, held = stashing(layers=3, fills_what_is_freed=fills_what_is_freed)
    outs = [call(region, num_valid=16)[0] for _ in range(4)]
    ((first, second),) = held.pools.values()
    assert (len(first.pages.near), len(second.pages.near)) == (3 * 4, pages)
    del outs


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


class FakeCuda:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.captures = False

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.stream

    def is_current_stream_capturing(self) -> bool:
        return self.captures


def test_a_captured_step_waits_for_nothing_that_was_not_captured() -> None:
    log: list[tuple[str, str]] = []
    eager, captured, beside = (FakeStream(name, log) for name in ("eager", "captured", "beside"))
    cuda = FakeCuda(eager)
    order = CudaOrder(torch.device("cpu"), cuda)
    order.enter()
    cuda.captures = True
    for cuda.stream in (captured, beside):
        order.enter()
    assert log == [("beside", "captured")]
    cuda.captures = False
    cuda.stream = eager
    order.enter()
    assert log == [("beside", "captured"), ("eager", "beside")]


def test_streams_use_pages_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str]] = []
    lent: list[str] = []
    one, other = FakeStream("one", log), FakeStream("other", log)
    cuda = FakeCuda(one)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: lent.append(stream.name), raising=False)
    held = Stash(CudaOrder(torch.device("cpu"), cuda), page_rows=4, spill=False, pinned=False)
    region = StashPolicy(held, share=1.0).wrap("region", torch.sin)
    out, _ = call(region, num_valid=16)
    held.settle()
    assert log == []
    cuda.stream = other
    out.sum().backward()
    assert log == [("other", "one")]
    assert lent == ["other"], "pages are freed at the end of the backward that read them"
    cuda.stream = one
    call(region, num_valid=16)
    assert log == [("other", "one"), ("one", "other")]
    assert lent == ["other"]
