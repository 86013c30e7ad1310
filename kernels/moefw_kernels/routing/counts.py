"""Counts and capacity in plain PyTorch that never waits for the device. E experts, K choices, -1 is none."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.counting_sort import counting_sort


def count_choices(ids_TK: Tensor, num_experts: int) -> Tensor:
    """How often each expert is chosen, (E) fp32; -1 is not counted."""
    # Shifted by one: -1 is counted at 0, which is cut off. To select the others would make the host wait.
    return count_ids(ids_TK + 1, num_experts + 1)[1:]


def count_ids(ids_TK: Tensor, num_experts: int) -> Tensor:
    """How often each expert is chosen, (E) fp32, where no id is -1."""
    counts_E = torch.zeros(num_experts, dtype=torch.float32, device=ids_TK.device)
    flat = ids_TK.flatten()
    return counts_E.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))


def within_capacity(ids_TK: Tensor, capacity: int, num_experts: int, *, by: Tensor | None = None) -> Tensor:
    """Mask of the choices that experts keep, bool like ``ids_TK``; False for -1.

    An expert keeps its first ``capacity`` choices in order (token, k); with ``by`` (like ``ids_TK``), those with the
    largest values, ties in that order.
    """
    flat = ids_TK.flatten()
    if by is None:
        found = counting_sort(flat, num_experts)
        order = found.order_N
    else:
        best = by.flatten().argsort(descending=True, stable=True)
        found = counting_sort(flat[best], num_experts)
        order = best[found.order_N]
    first = found.ends_e - found.counts_e
    # The place of each choice among those of its expert. Of -1, which comes last, it is that of expert 0 and unused.
    place = torch.arange(len(order), device=flat.device) - first[flat[order].clamp_min(0)]
    is_kept = torch.empty_like(flat, dtype=torch.bool)
    is_kept[order] = place < capacity
    return (is_kept & (flat >= 0)).view_as(ids_TK)
