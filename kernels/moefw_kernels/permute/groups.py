"""Index arithmetic of expert groups: where rows go when they are sorted by expert and groups are padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefw_kernels.permute.reference import RowMap, gather, gather_sum, row_map


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows that arrived as chunks, put into groups by expert.

    ``rows`` maps arrived rows to grouped rows; None where they already lie in order, without padding.
    """

    rows: RowMap | None
    sizes: tuple[int, ...]
    counts_e: Tensor
    offsets_e: Tensor

    def regroup(self, rows_ND: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return arrived rows and their weights in groups; padding is zero. Differentiable."""
        if self.rows is None:
            return rows_ND, weights_N
        return gather(rows_ND, self.rows), gather(weights_N.unsqueeze(-1), self.rows).squeeze(-1)

    def restore(self, rows_RD: Tensor) -> Tensor:
        """Return grouped rows in the order in which they arrived, without padding. Differentiable."""
        return rows_RD if self.rows is None else gather_sum(rows_RD, self.rows)


def padded(count: int, alignment: int) -> int:
    """Return ``count`` rounded up to a multiple of ``alignment``."""
    return -(-count // alignment) * alignment


def group_chunks(
    chunks: Sequence[Sequence[int]],
    alignment: int,
    device: torch.device,
    *,
    capacity: int = 0,
    order: Sequence[int] | None = None,
) -> Groups:
    """Return how to regroup rows that lie in order (rank, expert, token) into (expert, rank, token).

    ``chunks[rank][expert]`` is the number of rows; a group has at least ``capacity`` rows and is padded to a multiple
    of ``alignment``. ``order`` lists the chunks in order of rank, where they lie in another.
    """
    num_ranks, num_experts = len(chunks), len(chunks[0])
    counts = [sum(chunk[expert] for chunk in chunks) for expert in range(num_experts)]
    sizes = tuple(padded(max(count, capacity), alignment) for count in counts)
    counts_e, offsets_e = _ends(counts, sizes, device)
    if sizes == tuple(counts) and (num_ranks == 1 or (num_experts == 1 and order is None)):
        return Groups(None, sizes, counts_e, offsets_e)
    arrived = torch.arange(sum(counts), dtype=torch.int32, device=device).split([n for chunk in chunks for n in chunk])
    ranks = order or range(num_ranks)
    token_N = torch.cat([arrived[rank * num_experts + expert] for expert in range(num_experts) for rank in ranks])
    return Groups(_filled(token_N, counts, sizes), sizes, counts_e, offsets_e)


def _filled(token_N: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> RowMap:
    """Return the map of rows whose tokens are given group by group, each group filled up to its size."""
    taken = [n for count, size in zip(counts, sizes, strict=True) for n in (count, size - count)]
    rows = torch.arange(sum(sizes), dtype=torch.int32, device=token_N.device).split(taken)
    row_N = torch.cat(rows[::2])
    row_T = torch.empty_like(token_N)
    row_T[token_N] = row_N
    if len(token_N) == sum(sizes):
        return row_map(token_N, row_T.unsqueeze(1))
    token_R = token_N.new_zeros(sum(sizes))
    token_R[row_N] = token_N
    return row_map(token_R, row_T.unsqueeze(1), padding=torch.cat(rows[1::2]).long())


def _ends(counts: Sequence[int], sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    counts_e = torch.tensor(counts, dtype=torch.int32, device=device)
    offsets_e = torch.tensor(sizes, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    return counts_e, offsets_e


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The choices of some tokens, sorted by expert: ``slot = token * K + k`` of each row, int32, and the inverse."""

    slot_R: Tensor
    rows: RowMap
    counts: Tensor


def sort_slots(expert_TK: Tensor, num_experts: int, *, num_rows: int | None = None) -> Slots:
    """Return the rows of a routing in order (expert, token, k). Ids outside 0..num_experts-1 get no row.

    ``counts`` (num_experts) int64 stays on the device; ``num_rows``, their sum, is read back from it if it is None.
    """
    num_tokens, k = expert_TK.shape
    flat = expert_TK.flatten()
    keys = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = keys.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, keys, torch.ones_like(keys))[:num_experts]
    num_rows = int(counts.sum()) if num_rows is None else num_rows
    slot_R = order[:num_rows].int()
    row_of_slot = slot_R.new_full((num_tokens * k,), -1)
    row_of_slot[slot_R] = torch.arange(num_rows, dtype=torch.int32, device=flat.device)
    token_R = slot_R // k if k else slot_R
    rows = row_map(token_R, row_of_slot.view(num_tokens, k), dropped=num_rows < num_tokens * k)
    return Slots(slot_R, rows, counts)


def distinct(unit_TK: Tensor) -> Tensor:
    """Return the ids with every repetition in a row set to -1: the units that each token must reach, each once."""
    same_TKK = unit_TK.unsqueeze(2) == unit_TK.unsqueeze(1)
    return unit_TK.masked_fill(same_TKK.tril(-1).any(2), -1)
