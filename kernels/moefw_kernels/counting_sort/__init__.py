"""Stable sort of ids of up to 1,024 experts, with their counts."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from moefw_kernels.counting_sort import reference
from moefw_kernels.counting_sort.sorted_ids import SortedIds
from moefw_kernels.devices import takes_kernels

MOST_EXPERTS: Final = 1024
"""The most experts for which the kernel sorts. With more, PyTorch does."""


def counting_sort(expert_N: Tensor, num_experts: int) -> SortedIds:
    """Order of the ids, how often each of 0..num_experts-1 occurs, and where it ends. The host does not wait.

    ``expert_N``: int64 or int32. Ids outside 0..num_experts-1 are not counted.
    """
    if type(expert_N) is not Tensor or not takes_kernels(expert_N) or torch.compiler.is_compiling():
        return reference.counting_sort(expert_N, num_experts)
    if num_experts > MOST_EXPERTS:
        return reference.counting_sort(expert_N, num_experts)
    from moefw_kernels.counting_sort import triton

    return triton.counting_sort(expert_N, num_experts)


__all__ = ["MOST_EXPERTS", "SortedIds", "counting_sort"]
