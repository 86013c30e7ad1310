"""The kernel that adds up a token's rows has the bits of the reference's sum in fp32, rounded to nearest even once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from test_quantize_kernels import awkward
from torch import Tensor

from moefw_kernels.permute import gather_sum, reference, rows, sort_slots
from moefw_kernels.permute.rows import RowMap
from pairwise import deep


def maps() -> Iterator[RowMap]:
    """One choice, several, dropped ones, a token without any, one token, no tokens."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((37, 1), (37, 3), (29, 8), (1, 2), (0, 3)):
        ids_TK = torch.randint(0, 5, shape, generator=generator)
        yield sort_slots(ids_TK, 5).rows
        yield sort_slots(ids_TK.masked_fill(ids_TK % 2 == 0, -1), 5).rows


def same(mine: Tensor, right: Tensor) -> None:
    """Compare all bits except those of NaN."""
    assert (mine.dtype, mine.shape) == (right.dtype, right.shape)
    assert torch.equal(mine.isnan(), right.isnan())
    word = {2: torch.int16, 4: torch.int32}[mine.element_size()]
    assert torch.equal(*(each.masked_fill(each.isnan(), 0).view(word) for each in (mine, right)))


def kernel_as_the_reference(dtype: torch.dtype) -> None:
    from moefw_kernels.permute import triton

    for of in maps():
        for columns in (1, 17, 256, 389):
            x_RD = awkward((len(of.token_R), columns), dtype)
            for view in (x_RD, torch.cat([x_RD, x_RD], 1)[:, :columns], x_RD.mT.contiguous().mT):
                found = triton.gather_sum(view, of.row_TK)
                if len(x_RD):
                    same(found, reference.gather_sum(view.float().contiguous(), of.row_TK, of.bags).to(dtype))
                else:
                    assert found.shape == (len(of.row_TK), columns)
                    assert not found.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *deep(torch.float32, torch.float16)], ids=str)
def test_the_kernel_has_the_bits_of_the_reference_in_fp32(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    interpreter.submit(kernel_as_the_reference, dtype).result()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_reference_adds_in_order_in_fp32_and_rounds_once(dtype: torch.dtype) -> None:
    """In bf16 it rounds once, too, but ties as torch's library for this processor does."""
    for of in maps():
        x_RD = torch.randn(len(of.token_R), 17, generator=torch.Generator().manual_seed(1)).to(dtype)
        total_TD = torch.zeros(len(of.row_TK), 17)
        for row_T in of.row_TK.mT if len(x_RD) else ():
            total_TD += torch.where((row_T >= 0).unsqueeze(1), x_RD[row_T.clamp_min(0)].float(), 0.0)
        same(gather_sum(x_RD, of), total_TD.to(dtype))


def test_rows_on_a_gpu_are_added_up_by_the_kernel_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefw_kernels.permute import triton

    of = sort_slots(torch.tensor([[0, 1], [1, 2], [-1, 0]]), 3).rows
    calls: list[str] = []

    def kernel(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
        calls.append("kernel")
        return reference.gather_sum(rows_RD, row_TK, of.bags)

    monkeypatch.setattr(triton, "gather_sum", kernel)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    x_RD = torch.ones(5, 3, requires_grad=True)
    gather_sum(x_RD, of).sum().backward()
    assert calls == ["kernel"]
    assert x_RD.grad is not None
    assert (x_RD.grad == 1).all()
    x_TD = torch.ones(3, 3, requires_grad=True)
    of.gather(x_TD).sum().backward()
    assert calls == ["kernel"] * 2
    assert x_TD.grad is not None
    assert x_TD.grad[:, 0].tolist() == [2, 2, 1]


class Subclass(Tensor):
    """A tensor subclass."""


OTHERS: dict[str, Any] = {
    "fp64": lambda x_RD: x_RD.double(),
    "a subclass": lambda x_RD: x_RD.as_subclass(Subclass),
}


@pytest.mark.parametrize("other", OTHERS)
def test_all_else_takes_operations_of_pytorch(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x_RD = OTHERS[other](torch.ones(5, 3))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    assert not rows._takes_kernel(x_RD)
    assert rows._takes_kernel(torch.ones(5, 3))


def rows_as_the_reference() -> None:
    from moefw_kernels.permute import triton

    for length, num_rows, k in ((0, 0, 2), (1, 1, 1), (1, 0, 1), (1031 * 3, 1031 * 3, 3), (1031 * 3, 2000, 3)):
        order_N = torch.randperm(length, generator=torch.Generator().manual_seed(length)).int()
        for mine, right in zip(
            triton.tokens_and_rows(order_N, num_rows, k), reference.tokens_and_rows(order_N, num_rows, k), strict=True
        ):
            assert mine.dtype == right.dtype == torch.int32
            assert torch.equal(mine, right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", True, raising=False)
        patch.delattr(reference, "tokens_and_rows")
        slots = sort_slots(torch.tensor([[2, 0], [1, -1], [0, 0]]), 3, num_rows=5)
    assert slots.slot_R.tolist() == [1, 4, 5, 2, 0]
    assert slots.rows.token_R.tolist() == [0, 2, 2, 1, 0]
    assert slots.rows.row_TK.tolist() == [[4, 0], [3, -1], [1, 2]]


def test_a_kernel_finds_the_tokens_of_rows_and_the_rows_of_choices(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(rows_as_the_reference).result()
