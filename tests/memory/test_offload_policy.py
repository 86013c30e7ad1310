"""One region under offload: which tensors move, which buffers they use, and the order of copies."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fake_cuda import FakeCuda
from moefw.plugins.memory.offload.buffers import host_memory
from moefw.plugins.memory.offload.policy import OffloadPolicy
from moefw.plugins.memory.offload.pool import Pool
from moefw.plugins.memory.offload.streams import CudaTransfers, PlainTransfers
from moefw.plugins.memory.recompute.policy import RecomputePolicy
from moefw.testing.suites.watch import same_bits

CPU = torch.device("cpu")


def offloading(*, min_bytes: int = 0, fraction: float = 1.0) -> tuple[OffloadPolicy, Pool]:
    pool = Pool(host_memory(pinned=False), PlainTransfers(CPU))
    return OffloadPolicy(pool, min_bytes=min_bytes, fraction=fraction), pool


def test_a_forward_that_fails_gives_its_buffers_back() -> None:
    policy, pool = offloading()

    def fails(x: Tensor) -> Tensor:
        x.exp().tanh()
        raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        policy.wrap("region", fails)(torch.ones(9, requires_grad=True))
    assert pool.num_buffers == pool.num_idle == 2


def test_a_buffer_is_free_as_soon_as_its_values_are_back() -> None:
    policy, pool = offloading()
    x = torch.randn(9, requires_grad=True)
    y = policy.wrap("region", torch.exp)(x).sum()
    y.backward(retain_graph=True)
    assert pool.copies
    assert pool.num_buffers == pool.num_idle == 1
    policy.wrap("region", torch.exp)(-x).sum().backward()
    x.grad = None
    y.backward()
    assert x.grad is not None
    assert same_bits(x.grad, x.detach().exp())


def test_buffers_of_a_closed_pool_are_freed() -> None:
    policy, pool = offloading()
    x = torch.ones(9, requires_grad=True)
    y = policy.wrap("region", torch.exp)(x)
    pool.close()
    y.sum().backward()
    assert x.grad is not None
    assert pool.num_buffers == 1
    assert pool.num_idle == 0


def moved_bytes(pool: Pool) -> list[int]:
    return [span.nbytes for span in pool.copies]


def exponentials(*sizes: int) -> list[Tensor]:
    """A region that saves a tensor of each size in bytes."""
    return [torch.ones(size // 4, requires_grad=True).exp() for size in sizes]


@pytest.mark.parametrize(
    ("fraction", "moved"),
    [(0.0, []), (0.25, [100]), (0.5, [100, 200]), (0.75, [100, 200, 300]), (1.0, [400, 100, 200, 300])],
)
def test_a_fraction_is_a_share_of_the_bytes(fraction: float, moved: list[int]) -> None:
    policy, pool = offloading(fraction=fraction)
    for _ in range(2):
        results = policy.wrap("region", exponentials)(400, 100, 200, 300)
        assert sorted(moved_bytes(pool)) == sorted(moved)
        assert sum(moved) <= fraction * 1000
        del results


def test_a_tensor_that_stays_is_not_counted_again() -> None:
    policy, pool = offloading(fraction=0.5)

    results = policy.wrap("region", lambda x: [x.sin(), x.cos(), x.pow(3)])(torch.ones(100, requires_grad=True))
    assert len(results) == 3
    assert moved_bytes(pool) == []


def test_small_tensors_stay() -> None:
    policy, pool = offloading(min_bytes=200)
    results = policy.wrap("region", exponentials)(400, 196, 200, 100)
    assert sorted(moved_bytes(pool)) == [200, 400]
    del results


def test_a_tensor_that_is_saved_twice_is_copied_once_and_comes_back_as_one() -> None:
    policy, pool = offloading()
    x = torch.randn(6, 8, requires_grad=True) * 1.0
    sine, cosine = policy.wrap("region", lambda x: (x.sin(), x.t().cos()))(x)
    tangent = policy.wrap("another", torch.tan)(x.detach().requires_grad_())
    assert moved_bytes(pool)[:1] == [6 * 8 * 4]
    assert pool.num_buffers == 2  # x, and the result of tan, which tan saves
    del tangent
    back, turned = sine.grad_fn._saved_self, cosine.grad_fn._saved_self
    assert back.untyped_storage().data_ptr() == turned.untyped_storage().data_ptr()
    assert back.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert same_bits(back, x)
    assert same_bits(turned, x.t())
    assert (turned.stride(), turned.shape) == (x.t().stride(), x.t().shape)


def test_a_tensor_that_was_changed_in_place_is_another_one() -> None:
    policy, _ = offloading()
    x = torch.ones(16)
    weight = torch.ones(16, requires_grad=True)
    region = policy.wrap("region", torch.mul)
    waiting = region(weight, x)
    x.add_(1.0)
    region(weight, x).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, x)
    assert waiting.requires_grad


def test_a_tensor_that_stays_dies_with_its_graph() -> None:
    policy, _ = offloading(fraction=0.0)
    result = policy.wrap("region", torch.exp)(torch.ones(16, requires_grad=True))
    storage = StorageWeakRef(result.untyped_storage())
    gc.disable()
    try:
        del result
        assert storage.expired()
    finally:
        gc.enable()


def test_memory_that_is_given_out_again_is_another_tensor() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x * 1.01).sin()
        return x

    policy, pool = offloading()
    grads = []
    for function in (chain, policy.wrap("region", chain)):
        x = torch.linspace(0.0, 1.0, 4096).requires_grad_()
        y = function(x)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert pool.num_buffers >= 20


@pytest.mark.parametrize(
    "like", [lambda x: x[:, 1:3], lambda x: x.t()[1:], lambda x: x[:, :1].expand(-1, 5), lambda x: x[2, 3]]
)
def test_views_come_back_with_their_strides(like: Callable[[Tensor], Tensor]) -> None:
    policy, _ = offloading()
    x = like(torch.randn(6, 8)).requires_grad_()
    back = policy.wrap("region", torch.sin)(x).grad_fn._saved_self
    assert same_bits(back, x)
    assert back.stride() == x.stride()


def test_parts_side_by_side_of_one_matrix_go_as_one() -> None:
    policy, pool = offloading()
    x = torch.randn(8, 16, requires_grad=True)

    def gated(x: Tensor) -> Tensor:
        gate, up = (x * 2).chunk(2, -1)
        return gate * up

    y = policy.wrap("region", gated)(x)
    assert moved_bytes(pool) == [8 * 16 * 4]
    y.sum().backward()
    assert x.grad is not None
    assert same_bits(x.grad, torch.autograd.grad(gated(x).sum(), x)[0])


def test_a_slice_of_something_much_larger_goes_alone() -> None:
    policy, pool = offloading()
    x = torch.randn(64, 16, requires_grad=True)
    y = policy.wrap("region", lambda x: (x * 2)[:4, :8].sin())(x)
    assert moved_bytes(pool) == [(3 * 16 + 8) * 4]
    y.sum().backward()


def test_parameters_and_their_views_stay() -> None:
    policy, pool = offloading()
    weight = nn.Parameter(torch.randn(7, 5))

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            turned = weight.t()
        return torch.nn.functional.linear(x, weight) @ weight + x @ turned @ weight * weight[0]

    x = torch.randn(3, 5, requires_grad=True)
    result = policy.wrap("region", region)(x)
    assert moved_bytes(pool)
    assert not {span.length for span in pool.copies} & {weight.numel(), weight.shape[1]}
    result.sum().backward()


def test_what_is_not_on_the_device_stays() -> None:
    policy, pool = offloading()
    x = torch.ones(16, device="meta", requires_grad=True)
    assert policy.wrap("region", torch.exp)(x).requires_grad
    assert pool.num_buffers == 0


def test_a_recomputed_forward_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def inner(x: Tensor) -> Tensor:
        runs.append(x.shape)
        return x.sin()

    policy, pool = offloading()
    moved = policy.wrap("inner", inner)
    x = torch.randn(32, requires_grad=True)
    y = RecomputePolicy().wrap("outer", lambda x: moved(x * 2).exp())(x)
    assert pool.num_buffers == 1
    monkeypatch.setattr(pool, "take", lambda nbytes: pytest.fail("a buffer is taken in backward"))
    y.sum().backward()
    assert len(runs) == 2
    assert x.grad is not None
    assert same_bits(x.grad, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])


def test_what_a_recomputed_region_is_given_waits_elsewhere() -> None:
    given: list[StorageWeakRef] = []

    def inner(x: Tensor) -> Tensor:
        given.append(StorageWeakRef(x.untyped_storage()))
        return x.sin().cos()

    policy, _ = offloading()
    again = RecomputePolicy().wrap("inner", inner)
    x = torch.randn(32, requires_grad=True)
    y = policy.wrap("outer", lambda x: again(x * 2))(x)
    assert given[0].expired()
    y.sum().backward()
    wanted = torch.autograd.grad(inner(x * 2).sum(), x)[0]
    assert x.grad is not None
    assert same_bits(x.grad, wanted)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    holds = lambda tensor, stream: fake.log.append(("holds", stream.name))  # noqa: E731
    monkeypatch.setattr(Tensor, "record_stream", holds, raising=False)
    return fake


def test_copies_are_ordered_against_the_computation_both_ways(cuda: FakeCuda) -> None:
    pool = Pool(host_memory(pinned=False), CudaTransfers(CPU, cuda))
    policy = OffloadPolicy(pool, min_bytes=0, fraction=1.0)
    x = torch.randn(8, requires_grad=True)
    y = policy.wrap("region", torch.sin)(x)
    computed = ("record", "compute", 0)
    out = [computed, ("wait", "out", 0), ("copy", "out"), ("record", "out", 3), ("holds", "out")]
    assert cuda.log == out
    y.sum().backward()
    free = [("record", "compute", 5), ("wait", "back", 5), ("wait", "back", 3)]
    back = [("copy", "back"), ("record", "back", 9), ("holds", "back"), ("wait", "compute", 9), ("holds", "compute")]
    assert cuda.log[5:] == free + back
    assert x.grad is not None
    assert same_bits(x.grad, x.detach().cos())
    del cuda.log[:]
    policy.wrap("region", torch.sin)(x)
    assert cuda.log[:4] == [("record", "compute", 0), ("wait", "out", 0), ("wait", "out", 9), ("copy", "out")]


class Passing(torch.autograd.Function):
    """Logs when backward has left a region."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[tuple[Any, ...]], number: int) -> Tensor:
        ctx.log, ctx.number = log, number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(("enter", ctx.number))
        return grad, None, None


def test_backward_fetches_one_region_ahead(cuda: FakeCuda) -> None:
    pool = Pool(host_memory(pinned=False), CudaTransfers(CPU, cuda))
    region = OffloadPolicy(pool, min_bytes=0, fraction=1.0).wrap("region", lambda x: (x * 2).sin())
    x = torch.randn(8, requires_grad=True)
    y = x
    for number in range(4):
        y = Passing.apply(region(y), cuda.log, number)
    del cuda.log[:]
    y.sum().backward()
    events = [entry for entry in cuda.log if entry[0] == "enter" or entry == ("copy", "back")]
    copy = ("copy", "back")
    assert events == [("enter", 3), copy, copy, ("enter", 2), copy, ("enter", 1), copy, ("enter", 0)]


def test_two_micro_batches_do_not_fetch_for_each_other_what_is_gone(cuda: FakeCuda) -> None:
    pool = Pool(host_memory(pinned=False), CudaTransfers(CPU, cuda))
    region = OffloadPolicy(pool, min_bytes=0, fraction=1.0).wrap("region", lambda x: (x * 2).sin())
    one, other = (region(region(torch.randn(8, requires_grad=True))) for _ in range(2))
    one.sum().backward()
    assert cuda.log.count(("copy", "back")) == 2
    other.sum().backward()
    assert cuda.log.count(("copy", "back")) == 4
    assert pool.num_buffers == pool.num_idle == 4
