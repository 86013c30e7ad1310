"""Products of groups of rows, of tensors or of operands that multiply themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.add_wgrad import add_wgrad
from moefw_kernels.cpu_products import compiles_by_shape
from moefw_kernels.cpu_products import grouped_mm as in_few_shapes
from moefw_kernels.devices import is_gpu
from moefw_kernels.empty_groups import clear_empty_groups


def grouped_mm(a: Any, b: Any, ends_e: Tensor) -> Tensor:
    """Products of groups: ``a`` (R, I) with ``b`` (e, I, O), or, summing over rows, (O, R) with (R, I).

    A sum over no rows is zero.
    """
    if not isinstance(a, Tensor):
        product: Tensor = a.grouped_mm(b, ends_e)
        return product
    sums_over_rows = b.dim() == 2
    if not a.numel():
        if sums_over_rows:
            return a.new_zeros(len(ends_e), len(a), b.shape[-1])
        return a.new_zeros(len(a), b.shape[-1])
    if compiles_by_shape(a) and type(a) is Tensor:
        return _sums(a, b, ends_e) if sums_over_rows else in_few_shapes(a, b, ends_e)
    product = _product(a, b, ends_e)
    if sums_over_rows and _leaves_empty_sums_unwritten(product.device):
        clear_empty_groups(product, ends_e)
    return product


def _product(a: Any, b: Any, ends_e: Tensor) -> Tensor:
    """Product of PyTorch, which while it compiles takes bf16 alone, though kernels multiply fp32."""
    multiply: Any = F.grouped_mm
    if torch.compiler.is_compiling() and a.dtype is not torch.bfloat16:
        multiply = torch.compiler.disable(multiply)
    product: Tensor = multiply(a, b, offs=ends_e)
    return product


def _sums(a_OR: Tensor, b_RI: Tensor, ends_e: Tensor) -> Tensor:
    """Sums over the rows of each group, ``(e, O, I)``."""
    sums_eOI = a_OR.new_empty(len(ends_e), len(a_OR), b_RI.shape[1])
    add_wgrad(sums_eOI, a_OR.mT, b_RI, ends_e, fresh=True)
    return sums_eOI


@cache
def _leaves_empty_sums_unwritten(device: torch.device) -> bool:
    """Whether grouped products leave sums over no rows unwritten, as on Blackwell (pytorch#172439)."""
    return is_gpu(device) and torch.cuda.get_device_capability(device)[0] >= 10
