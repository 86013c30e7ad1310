"""A counted device computes like a CPU, and notes each wait of the host for it and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.testing.host_waits import HostWaits, available
from moefw.testing.pool import RankPool

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no devices that are written in Python")


def grouped(x: Tensor) -> Tensor:
    """Return a product of one group."""
    ends_e = torch.ones(1, dtype=torch.int32, device=x.device)
    return torch.nn.functional.grouped_mm(x.repeat(2).view(1, 8), x.repeat(16).view(1, 8, 8), offs=ends_e)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[1].item(),
    "a truth value": lambda x: bool(x[1] > 0),
    "an integer": lambda x: int(x.sum()),
    "a list": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to pageable memory": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "to pinned memory, blocking": lambda x: torch.empty(4, pin_memory=True).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "one where": lambda x: torch.where(x > 1),
    "a mask": lambda x: x[x > 1],
    "a mask to write": lambda x: x.index_put_([x > 1], x.new_zeros(())),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: torch.bincount(x.long()),
    "repeats of unknown sum": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x + 1),
    "a grouped product in fp32": lambda x: grouped(x),
    "an event": lambda x: torch.get_device_module(x.device).Event().synchronize(),
    "the device": lambda x: torch.get_device_module(x.device).synchronize(),
}
UPLOADS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a list like another": lambda x: x.new_tensor([1.0, 2.0]),
    "to": lambda x: torch.ones(3).to(x.device),
    "pageable": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "pinned, blocking": lambda x: torch.ones(3).pin_memory().to(x.device),
    "copy": lambda x: x.copy_(torch.ones(4)),
    "an index": lambda x: x[torch.tensor([0, 1])],
    "a scalar of the CPU": lambda x: torch.where(x > 1, x, torch.tensor(0.0)),
}
NEITHER: dict[str, Callable[[Tensor], Any]] = {
    "factories": lambda x: (torch.zeros(2, device=x.device), torch.arange(3, device=x.device), x.new_full((2,), 1.0)),
    "numbers": lambda x: torch.where(x > 1, x * 2.0 + 1.0, 0.0),
    "an element": lambda x: x.__setitem__(0, 1.0),
    "known repeats": lambda x: x.repeat_interleave((x > 0).long(), output_size=3),
    "a sort": lambda x: x.argsort(stable=True),
    "indices": lambda x: x[x.long().clamp_max(2)],
    "pinned, asynchronous": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "to pinned memory, asynchronous": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "an event that nobody awaits": lambda x: torch.get_device_module(x.device).Event().record(),
    "a grouped product in bf16": lambda x: grouped(x.bfloat16()),
    "the CPU's own": lambda x: (torch.ones(3)[torch.ones(3) > 0], torch.ones(()).item()),
}


KINDS = {"reads": (READS, (1, 0)), "uploads": (UPLOADS, (0, 1)), "neither": (NEITHER, (0, 0))}


def counted(kind: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of reads and uploads of each entry of a table."""
    found = {}
    for name, code in KINDS[kind][0].items():
        with HostWaits() as waits:
            code(waits.on_device(torch.arange(4.0)))
        found[name] = len(waits.reads), len(waits.uploads)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_reads_and_uploads_are_noted_and_nothing_else(own_pool: RankPool, kind: str) -> None:
    table, wanted = KINDS[kind]
    assert own_pool.run(counted, 1, kind) == [dict.fromkeys(table, wanted)]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 + grad.sum().item()


def trained() -> tuple[list[float], list[str], list[str]]:
    """Return a gradient, and what forward and backward wait in."""
    with HostWaits() as waits:
        layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(layer.weight)
        waits.move(layer)
        hidden = layer(waits.on_device(torch.tensor([[1.0, 2.0]])))
        hidden[:, 1:].mul_(3.0)
        out = _Doubled.apply(hidden).sum()
        forward = [str(wait) for wait in waits.reads]
        out.backward()
        assert layer.weight.grad is not None
        gradient = waits.on_host(layer.weight.grad).flatten().tolist()
        return gradient, forward, [str(wait) for wait in waits.reads]


def test_waits_are_noted_in_the_backward_of_a_function_and_name_its_line(own_pool: RankPool) -> None:
    ((gradient, forward, backward),) = own_pool.run(trained, 1)
    assert gradient == [4.0, 8.0, 12.0, 24.0]
    assert forward == []
    (wait,) = backward
    assert "_local_scalar_dense" in wait
    assert "tests/contracts/test_host_waits.py" in wait
    assert wait.split(" < ")[0].endswith(" backward")


def raced() -> tuple[list[int], list[int]]:
    """Return what a copy to the host holds before and after the wait for its event."""
    with HostWaits() as waits:
        pinned = torch.empty(2, dtype=torch.int64, pin_memory=True)
        pinned.copy_(waits.on_device(torch.tensor([3, 4])), non_blocking=True)
        event = torch.get_device_module(waits.device).Event()
        event.record()
        early = pinned.tolist()
        event.synchronize()
        return early, pinned.tolist()


def test_a_copy_that_is_read_before_its_event_holds_garbage(own_pool: RankPool) -> None:
    ((early, late),) = own_pool.run(raced, 1)
    assert late == [3, 4]
    assert not {3, 4} & {*early}


def moved() -> tuple[list[float], list[float], int]:
    """Return what an all-to-all and an all-reduce bring, and the number of waits."""
    with HostWaits() as waits:
        mine = waits.on_device(torch.arange(2.0) + 10 * dist.get_rank())
        came, total = torch.empty_like(mine), mine.clone()
        dist.all_to_all_single(came, mine, async_op=True).wait()
        dist.all_reduce(total)
        noted = len(waits.reads) + len(waits.uploads)
        return waits.on_host(came).tolist(), waits.on_host(total).tolist(), noted


def test_collectives_move_the_values_and_are_no_waits(own_pool: RankPool) -> None:
    assert own_pool.run(moved, 2) == [([0.0, 10.0], [10.0, 12.0], 0), ([1.0, 11.0], [10.0, 12.0], 0)]


def mixed() -> list[str]:
    """Return the errors for what a GPU refuses, and for use outside."""
    with HostWaits() as waits:
        x = waits.on_device(torch.ones(2))
        with pytest.raises(ContractError) as both:
            x + torch.ones(2)
    with pytest.raises(ContractError) as outside:
        x + 1
    return [str(both.value), str(outside.value)]


def test_what_no_gpu_accepts_is_refused(own_pool: RankPool) -> None:
    ((both, outside),) = own_pool.run(mixed, 1)
    assert "tensors of a CPU and of a GPU" in both
    assert "outside of HostWaits" in outside
