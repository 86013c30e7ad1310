"""How fast this CPU multiplies in bf16."""

from __future__ import annotations

import timeit
from typing import Final

import torch

SIZE: Final = 512
"""Rows and columns of the matrices that are multiplied."""


def bf16_over_fp32() -> float:
    """Time of a product of bf16 matrices on this CPU, in times of a product of fp32 matrices."""
    return _product_s(torch.bfloat16) / _product_s(torch.float32)


def against_bf16() -> str:
    """Advice for a CPU that multiplies bf16 more slowly than fp32; of another one, nothing."""
    times = bf16_over_fp32()
    if times <= 1:
        return ""
    return (
        f"a bf16 product takes {times:.1f} times as long as one in fp32 on this CPU: precision.use=fp32 trains faster"
    )


def _product_s(dtype: torch.dtype) -> float:
    matrix = torch.randn(SIZE, SIZE).to(dtype)
    return min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))
