"""Zeros where a grouped product sums over no rows."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.empty_groups import reference

__all__ = ["clear_empty_groups"]


@torch.no_grad()
def clear_empty_groups(product_eNI: Tensor, ends_e: Tensor) -> None:
    """Set the matrices of groups without rows to zero in place, and leave all others unread.

    ``product_eNI`` (e, N, I) contiguous; ``ends_e`` int32, where each group of rows ends. The host waits for nothing.

    Raises:
        ValueError: ``product_eNI`` is not contiguous.
    """
    if not product_eNI.is_contiguous():
        raise ValueError(f"a product of strides {product_eNI.stride()} is not contiguous: give one that is")
    if takes_kernels(product_eNI):
        from moefw_kernels.empty_groups import triton

        triton.clear_empty_groups(product_eNI, ends_e)
    else:
        reference.clear_empty_groups(product_eNI, ends_e)
