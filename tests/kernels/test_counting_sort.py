"""The counting sort equals a stable sort: the reference, and the kernels in Triton's interpreter."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from moefw_kernels.counting_sort import MOST_EXPERTS, SortedIds, counting_sort, reference
from moefw_kernels.permute import sort_choices
from pairwise import each_value

IDS = {
    "random": lambda n, e, g: torch.randint(0, e, (n,), generator=g),
    "dropped and out of range": lambda n, e, g: torch.randint(-2, e + 3, (n,), generator=g),
    "all the same": lambda n, e, g: torch.full((n,), e - 1),
    "all dropped": lambda n, e, g: torch.full((n,), -1),
    "descending": lambda n, e, g: torch.arange(n, 0, -1) % e,
    "few of many": lambda n, e, g: torch.randint(0, 3, (n,), generator=g) * (e // 3),
}


def check(ids: str, length: int, experts: int, dtype: torch.dtype, kernel: bool) -> None:
    if kernel:
        from moefw_kernels.counting_sort.triton import counting_sort as sort
    else:
        sort = reference.counting_sort
    expert_N = IDS[ids](length, experts, torch.Generator().manual_seed(length)).to(dtype)
    keys = torch.where((expert_N < 0) | (expert_N >= experts), experts, expert_N)
    found = sort(expert_N, experts)
    assert found.order_N.tolist() == torch.sort(keys, stable=True).indices.tolist()
    wanted = torch.bincount(keys, minlength=experts + 1)[:experts]
    assert (found.counts.dtype, found.counts_e.dtype, found.ends_e.dtype) == (torch.int64, torch.int32, torch.int32)
    assert found.counts.tolist() == found.counts_e.tolist() == wanted.tolist()
    assert found.ends_e.tolist() == wanted.cumsum(0).tolist()


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("experts", [1, 7, 1024])
def test_the_reference(ids: str, experts: int) -> None:
    for length in (0, 1, 1031):
        check(ids, length, experts, torch.int64, kernel=False)


@pytest.mark.parametrize(("ids", "experts"), each_value(IDS, [1, 127, 1024]))
def test_the_kernels(interpreter: ProcessPoolExecutor, ids: str, experts: int) -> None:
    for length, dtype in ((0, torch.int64), (1, torch.int32), (1031, torch.int64)):
        interpreter.submit(check, ids, length, experts, dtype, kernel=True).result()


@pytest.mark.deep
def test_more_chunks_than_are_added_up_at_once(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(check, "dropped and out of range", 130 * 512 + 5, 5, torch.int64, kernel=True).result()


def test_the_kernel_sorts_on_a_gpu_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefw_kernels.counting_sort import triton

    calls: list[int] = []

    def kernel(expert_N: Tensor, num_experts: int) -> SortedIds:
        calls.append(num_experts)
        return reference.counting_sort(expert_N, num_experts)

    monkeypatch.setattr(triton, "counting_sort", kernel)
    ids_TK = torch.tensor([[1, 0], [0, -1]])
    counting_sort(ids_TK.flatten(), 2)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    counting_sort(ids_TK.flatten(), MOST_EXPERTS)
    counting_sort(ids_TK.flatten(), MOST_EXPERTS + 1)
    sort_choices(ids_TK, 2)
    assert calls == [MOST_EXPERTS, 2]
