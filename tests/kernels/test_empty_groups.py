"""Sums over no rows are zero: the reference, and the kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from moefw_kernels.empty_groups import clear_empty_groups, reference

SIZES = [(0, 3, 0, 0, 5), (2, 1), (0,), (0, 0, 7)]


def check(sizes: Sequence[int], shape: tuple[int, int], dtype: torch.dtype, kernel: bool) -> None:
    if kernel:
        from moefw_kernels.empty_groups.triton import clear_empty_groups as clear
    else:
        clear = reference.clear_empty_groups
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()
    product = torch.full((len(sizes), *shape), torch.nan, dtype=dtype)
    clear(product, ends)
    for matrix, size in zip(product, sizes, strict=True):
        assert matrix.isnan().all() if size else not matrix.any()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_without_rows_are_zero_and_others_are_left(sizes: Sequence[int]) -> None:
    check(sizes, (5, 7), torch.float32, kernel=False)


@pytest.mark.parametrize(("shape", "dtype"), [((5, 7), torch.float32), ((130, 129), torch.bfloat16)], ids=str)
def test_the_kernel(interpreter: ProcessPoolExecutor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for sizes in SIZES:
        interpreter.submit(check, sizes, shape, dtype, kernel=True).result()


def test_a_product_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        clear_empty_groups(torch.zeros(2, 3, 4).mT, torch.zeros(2, dtype=torch.int32))
