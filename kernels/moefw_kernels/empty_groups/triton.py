"""Zeros in groups without rows as a Triton kernel: a program of any other group ends after two loads."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 8192
"""Elements that a program fills."""
WARPS: Final = 8


@triton.jit
def _clear_kernel(product, ends, size, BLOCK: tl.constexpr):
    """Fill block ``program_id(1)`` of the ``size`` elements of group ``program_id(0)`` if the group has no rows."""
    group = tl.program_id(0)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    if tl.load(ends + group) == start:
        place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), product.dtype.element_ty)
        tl.store(product + group.to(tl.int64) * size + place, zeros, mask=place < size)


def clear_empty_groups(product_eNI: Tensor, ends_e: Tensor) -> None:
    """Implement ``reference.clear_empty_groups``."""
    if product_eNI.numel():
        groups = len(product_eNI)
        size = product_eNI[0].numel()
        _clear_kernel[(groups, triton.cdiv(size, BLOCK))](
            product=product_eNI,
            ends=ends_e,
            size=size,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
