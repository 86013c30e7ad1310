"""The sort in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.counting_sort.sorted_ids import SortedIds


def counting_sort(expert_N: Tensor, num_experts: int) -> SortedIds:
    """Implement ``moefw_kernels.counting_sort.counting_sort``."""
    keys = keys_of(expert_N, num_experts)
    counts = count(keys, num_experts)
    return SortedIds(keys.argsort(stable=True), counts, counts.int(), counts.cumsum(0, dtype=torch.int32))


def keys_of(expert_N: Tensor, num_experts: int) -> Tensor:
    """Ids as int64; ``num_experts`` stands for those outside 0..num_experts-1."""
    return torch.where((expert_N >= 0) & (expert_N < num_experts), expert_N, num_experts).long()


def count(keys_N: Tensor, num_experts: int) -> Tensor:
    """How often each of 0..num_experts-1 occurs in keys of at most ``num_experts``, int64."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=keys_N.device)
    return counts.scatter_add_(0, keys_N, torch.ones_like(keys_N))[:num_experts]
