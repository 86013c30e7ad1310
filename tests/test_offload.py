"""Offload: no bit changes, the device is relieved of what waits elsewhere, and buffers come back however a graph ends."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from memory_cases import PRECISIONS, Allocations, assert_same, model_trial, offload, recompute, run
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import moefw
from moefw.plugins.memory.offload.host import host_memory
from moefw.plugins.memory.offload.nvme import UnnamedFiles
from moefw.plugins.memory.offload.policy import OffloadPolicy
from moefw.plugins.memory.offload.pool import Pool, open_pool
from moefw.plugins.memory.offload.streams import CudaTransfers, PlainTransfers
from moefw.plugins.memory.recompute.policy import RecomputePolicy
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model
from moefw.testing.suites.watch import same_bits
from moefw.testing.training import SMALL, short_run
from moefw.testing.trial import DISPATCHERS, Trial, build_layer, received

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


@pytest.mark.parametrize("in_flight", [False, True], ids=["accumulated", "two in flight"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dispatch", ["alltoall", "hybridep"])
def test_no_bit_changes_in_any_region(pool: RankPool, dispatch: str, precision: str, in_flight: bool) -> None:
    parts = {"dispatch": DISPATCHERS[dispatch], "precision": PRECISIONS[precision]}
    for gemm, regions in (("grouped", REGIONS), ("loop", ("expert_fc1", "moe_act"))):
        plain = run(pool, [], in_flight=in_flight, gemm={"use": gemm}, **parts)
        for region in regions:
            assert_same(plain, run(pool, [offload(region)], in_flight=in_flight, gemm={"use": gemm}, **parts))


NESTED = {
    "offload in recompute": [recompute("layer"), offload("experts", "router")],
    "recompute in offload": [offload("layer"), recompute("experts", "attention")],
    "offload in offload": [offload("layer", "experts", "moe_act")],
    "activation offloaded in recompute": [recompute("experts"), offload("moe_act")],
    "activation recomputed in offload": [offload("experts"), recompute("moe_act")],
    "three deep": [recompute("layer", "moe_act"), offload("experts")],
    "three deep, turned": [offload("layer", "moe_act"), recompute("experts")],
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_bit_changes_where_regions_lie_in_each_other(pool: RankPool, precision: str, name: str) -> None:
    parts = {"gemm": {"use": "loop"}, "precision": PRECISIONS[precision]}
    for in_flight in (False, True):
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
    """Yield what runs one micro-batch forward on one rank and returns the loss, and the pool."""
    model, assembly, layout, shared = open_model(model_trial(1, memory, **parts))
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


def offloading(*, min_bytes: int = 0, fraction: float = 1.0) -> tuple[OffloadPolicy, Pool]:
    pool = Pool(host_memory(pinned=False), PlainTransfers(CPU))
    return OffloadPolicy(pool, min_bytes=min_bytes, fraction=fraction), pool


def moved_bytes(pool: Pool) -> list[int]:
    return [span.nbytes for span in pool.copies]


def exponentials(*sizes: int) -> list[Tensor]:
    """A region that saves a tensor of so many bytes each."""
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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_device_is_relieved_of_what_experts_save(precision: str) -> None:
    live, moved = {}, 0
    for memory in ([], [offload("experts")]):
        case = Trial(tokens=(64,), parts={"precision": PRECISIONS[precision], "memory": memory})
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
    """Tells when backward has left a region."""

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


KILLED = """
import sys, torch
from moefw.plugins.memory.offload.policy import OffloadPolicy
from moefw.plugins.memory.offload.pool import open_pool
pool = open_pool(torch.device("cpu"), sys.argv[1])
region = OffloadPolicy(pool, min_bytes=0, fraction=1.0).wrap("region", torch.sin)
kept = []
while True:
    kept = kept[-8:] + [region(torch.ones(1 << 18, requires_grad=True))]
    print(pool.num_buffers, flush=True)
"""


def test_a_killed_run_leaves_no_file(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(12):
        assert process.stdout.readline()
    open_files = Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert str(tmp_path) in open_files
    assert list(tmp_path.iterdir()) == []


def refused(memory: Sequence[Mapping[str, Any]], **parts: Any) -> str:
    with pytest.raises(moefw.PlanError) as caught:
        open_model(model_trial(1, memory, **parts))
    return str(caught.value)


def test_a_folder_that_is_missing_or_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("nowhere", "No such file or directory"), ("file", "Not a directory")):
        said = refused([offload("experts", to="nvme", path=str(tmp_path / name))])
        assert f"cannot write to path {str(tmp_path / name)!r}: {why}" in said
        assert said.endswith("Make the folder, or name another one, on every machine of the run.")


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(**_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    said = refused([offload("experts", to="nvme", path=str(tmp_path))])
    assert "Permission denied. Give this user the right to write there, or name another one" in said


def test_a_full_disk_is_told_when_a_buffer_is_made(tmp_path: Path) -> None:
    files = UnnamedFiles(tmp_path)
    pool = Pool(files, PlainTransfers(CPU))
    region = OffloadPolicy(pool, min_bytes=0, fraction=1.0).wrap("region", torch.sin)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(moefw.RunError) as caught:
            region(torch.ones(1 << 20, requires_grad=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = str(caught.value)
    assert f"no room for {1 << 22} more bytes in path {str(tmp_path)!r}: File too large." in said
    assert said.endswith("Free some, name a larger disk, or offload less (fraction, regions).")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_raises_out_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, assembly, layout, shared = open_model(model_trial(1, [offload("layer", to="nvme", path=str(tmp_path))]))
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(moefw.RunError, match="No space left on device"):
        model(replace(global_batch(assembly, layout, 0)[0], loss_scale=torch.tensor(1.0)))
    shared.close()


@pytest.mark.parametrize(("pinned", "kind"), [(False, "host memory"), (True, "page-locked host memory")])
def test_host_memory_that_cannot_be_had_is_told(pinned: bool, kind: str) -> None:
    words = rf"{1 << 62} bytes of {kind} for activations .* Offload less \(fraction, regions\), or use to: nvme"
    with pytest.raises(moefw.RunError, match=words):
        host_memory(pinned=pinned)(1 << 62)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ([offload("experts", to="nvme")], "nothing says where. Set path to a folder"),
        ([offload("experts", path="somewhere")], "with to: host there are none. Leave path out"),
        ([offload("experts", to="disk")], "'disk'"),
        ([offload("experts", fraction=1.5)], "fraction"),
        ([offload("experts", min_bytes=-1)], "min_bytes"),
        ([offload("experts"), recompute("experts")], "both treat region 'experts'"),
        ([offload("expert")], "Did you mean 'experts'?"),
        ([offload("moe_act")], "grouped offers moe_act=recompute"),
    ],
)
def test_what_cannot_be_is_refused(memory: Sequence[Mapping[str, Any]], says: str) -> None:
    with pytest.raises(moefw.MoefwError) as caught:
        model_trial(1, memory).assemble()
    assert says in str(caught.value)
