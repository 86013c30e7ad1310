"""Weight gradients are added to main gradients in place: the reference, and the kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from moefw_kernels.add_wgrad import add_wgrad, reference
from pairwise import pairwise

SIZES = [(0, 3, 0, 70, 5), (2, 1), (0,), (0, 0, 7)]
DTYPES = [torch.float32, torch.bfloat16]
UNREAD = 3
"""Rows past the last group, which are NaN."""


def check(
    sizes: Sequence[int], shape: tuple[int, int], operands: torch.dtype, main: torch.dtype, fresh: bool, kernel: bool
) -> None:
    if kernel:
        from moefw_kernels.add_wgrad.triton import add_wgrad as add
    else:
        add = reference.add_wgrad
    generator = torch.Generator().manual_seed(0)
    grad_RO, x_RI = (torch.randn(sum(sizes) + UNREAD, width, generator=generator).to(operands) for width in shape)
    grad_RO[sum(sizes) :] = x_RI[sum(sizes) :] = torch.nan
    ends_e = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()
    found = torch.randn(len(sizes), *shape, generator=generator).to(main)
    before = torch.zeros_like(found, dtype=torch.float64) if fresh else found.double()
    if fresh:
        found.fill_(torch.nan)
    add(found, grad_RO, x_RI, ends_e, fresh)
    groups = [rows.double() for rows in (grad_RO, x_RI)]
    pairs = zip(*(rows.split([*sizes, UNREAD]) for rows in groups), strict=True)
    products = torch.stack([grad.t() @ x for grad, x in pairs][: len(sizes)])
    in_fp32 = main is torch.float32 and (kernel or operands is torch.float32)
    atol, rtol = (1e-4, 1e-5) if in_fp32 else (0.2, 0.02)
    torch.testing.assert_close(found.double(), before + products, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("sizes", "operands", "main", "fresh"), pairwise(SIZES, DTYPES, DTYPES, [False, True]), ids=str
)
def test_products_of_groups_are_added(
    sizes: Sequence[int], operands: torch.dtype, main: torch.dtype, fresh: bool
) -> None:
    check(sizes, (5, 7), operands, main, fresh, kernel=False)


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fresh", [False, True], ids=["added", "fresh"])
def test_the_kernel(interpreter: ProcessPoolExecutor, main: torch.dtype, fresh: bool) -> None:
    """In fp16: the interpreter multiplies the bits of bf16."""
    for sizes in SIZES:
        interpreter.submit(check, sizes, (130, 72), torch.float16, main, fresh, kernel=True).result()


def test_one_group_needs_no_ends() -> None:
    grad_RO, x_RI, main_OI = torch.randn(9, 4), torch.randn(9, 6), torch.ones(4, 6)
    add_wgrad(main_OI, grad_RO, x_RI, None, fresh=False)
    torch.testing.assert_close(main_OI, grad_RO.t() @ x_RI + 1)


@pytest.mark.parametrize(
    ("main", "x"), [(torch.ones(6, 4).t(), torch.ones(9, 6)), (torch.ones(4, 6), torch.ones(9, 6).bfloat16())]
)
def test_what_does_not_fit_is_refused(main: Tensor, x: Tensor) -> None:
    with pytest.raises(ValueError, match="give contiguous ones, and operands of one dtype"):
        add_wgrad(main, torch.ones(9, 4), x, None, fresh=False)
