"""Counts, capacity and losses in plain PyTorch that never waits for the device. E experts, K choices, -1 is none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefw_kernels.counting_sort import counting_sort


def count_choices(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen, (E) fp32; -1 is not counted."""
    return count_ids(ids_TK + 1, num_experts + 1)[1:]


def count_ids(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return the same where no id is -1."""
    counts_E = torch.zeros(num_experts, dtype=torch.float32, device=ids_TK.device)
    flat = ids_TK.flatten()
    return counts_E.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))


def within_capacity(ids_TK: Tensor, capacity: int, num_experts: int, *, by: Tensor | None = None) -> Tensor:
    """Return a mask of the choices that experts keep, bool like ``ids_TK``; False for -1.

    An expert keeps its first ``capacity`` choices in order (token, k); with ``by`` (like ``ids_TK``), those with the
    largest values, ties in that order.
    """
    flat = ids_TK.flatten()
    if by is None:
        order, counts = counting_sort(flat, num_experts)
    else:
        best = by.flatten().argsort(descending=True, stable=True)
        order, counts = counting_sort(flat[best], num_experts)
        order = best[order]
    first = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=flat.device) - first[flat[order].clamp_min(0)]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = place < capacity
    return (kept & (flat >= 0)).view_as(ids_TK)


def switch_loss(
    shares_TE: Tensor,
    ids_TK: Tensor,
    valid_T: Tensor,
    row_T: Tensor,
    rows: int,
    add_up: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Return the load-balancing loss of each row of tokens times its valid tokens, summed: a scalar.

    A row of N valid tokens adds ``N * E / (K N^2) * sum_e mass_e n_e``. ``mass_e`` is the sum of their ``shares``
    (rows of probabilities), ``n_e`` the number of them with expert e in ``ids`` (-1 does not count). Switch, arXiv
    2101.03961 eq. 4-6; 1 for each token if experts are equally loaded. A row without valid tokens adds 0.

    ``row_T`` is the index of each token's row. If rows are spread over ranks, ``add_up`` sums a tensor over them in
    place, and each rank returns its part of the loss.
    """
    num_experts, k = shares_TE.shape[1], ids_TK.shape[1]
    flat_TK = torch.where(ids_TK >= 0, ids_TK + row_T.unsqueeze(1) * num_experts, -1)
    counts_RE = count_choices(flat_TK, rows * num_experts).view(rows, num_experts)
    valid_R = torch.zeros_like(counts_RE[:, 0]).index_add_(0, row_T, valid_T.to(counts_RE.dtype))
    seen_RX = torch.cat([counts_RE, valid_R.unsqueeze(1)], 1)
    if add_up is not None:
        add_up(seen_RX)
    mass_RE = shares_TE.new_zeros(rows, num_experts).index_add(0, row_T, shares_TE * valid_T.unsqueeze(1))
    per_token_R = (mass_RE * seen_RX[:, :-1]).sum(1) / seen_RX[:, -1].clamp_min(1)
    return per_token_R.sum() * (num_experts / k)


def load_loss(shares_TE: Tensor, valid_T: Tensor, load_E: Tensor) -> Tensor:
    """Return the sum over valid tokens of ``sum_e share_e load_e``: the balance loss against a given load.

    ``load`` is ``n_e E / (K N)`` of each expert, 1 if balanced. This is the Switch loss with counts from elsewhere.
    """
    return ((shares_TE * valid_T.unsqueeze(-1)).sum(0) * load_E).sum()


def z_loss(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """Return the sum over valid tokens of ``logsumexp(logits)^2`` (ST-MoE, arXiv 2202.08906 eq. 5)."""
    return (logits_TE.logsumexp(-1).square() * valid_T).sum()
