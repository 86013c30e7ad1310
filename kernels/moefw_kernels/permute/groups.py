"""Index arithmetic of expert groups: positions of rows that are sorted by expert, in padded groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefw_kernels.permute.rows import RowMap, gather, gather_sum, row_map

N = TypeVar("N", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows that arrived as chunks, grouped by expert.

    ``rows`` maps arrived rows to grouped rows; None if they are already in order, without padding.
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


def padded(count: N, alignment: int) -> N:
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
    """Return the regrouping of rows from order (rank, expert, token) to (expert, rank, token).

    ``chunks[rank][expert]`` is the number of rows; a group has at least ``capacity`` rows and is padded to a multiple
    of ``alignment``. If the chunks are in another order, ``order[rank]`` is the index of a rank's chunk.
    """
    chunk_Pe = np.asarray(chunks, dtype=np.int64)
    count_e = chunk_Pe.sum(0)
    size_e = padded(np.maximum(count_e, capacity), alignment)
    end_e, sizes = size_e.cumsum(), tuple(size_e.tolist())
    counts_e, offsets_e = (_on(device, values.astype(np.int32)) for values in (count_e, end_e))
    is_padded = bool((size_e != count_e).any())
    if not is_padded and (len(chunk_Pe) == 1 or (len(sizes) == 1 and order is None)):
        return Groups(None, sizes, counts_e, offsets_e)
    by_rank = list(range(len(chunk_Pe)) if order is None else order)
    begin_Pe = np.empty_like(chunk_Pe)
    begin_Pe[by_rank] = end_e - size_e + chunk_Pe[by_rank].cumsum(0) - chunk_Pe[by_rank]
    row_N = _spans(begin_Pe.ravel(), chunk_Pe.ravel(), device)
    token_R = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    token_R[row_N] = torch.arange(len(row_N), dtype=torch.int32, device=device)
    padding = _spans(end_e - size_e + count_e, size_e - count_e, device).long() if is_padded else None
    return Groups(row_map(token_R, row_N.unsqueeze(1), padding=padding), sizes, counts_e, offsets_e)


def _spans(begins: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return the numbers ``begin, begin + 1, ...`` of each span, concatenated, int32."""
    total, shifts = int(lengths.sum()), begins - (lengths.cumsum() - lengths)
    both = _on(device, np.stack([shifts, lengths]).astype(np.int32))
    spread = both[0].repeat_interleave(both[1], output_size=total)
    return spread.add_(torch.arange(total, dtype=torch.int32, device=device))


def _on(device: torch.device, values: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(values).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Choices of tokens, sorted by expert: ``slot = token * K + k`` of each row, int32, and the inverse."""

    slot_R: Tensor
    rows: RowMap
    counts: Tensor


def sort_slots(expert_TK: Tensor, num_experts: int, *, num_rows: int | None = None) -> Slots:
    """Return the rows of a routing in order (expert, token, k). Ids outside 0..num_experts-1 get no row.

    ``counts`` (num_experts) int64 stays on the device. ``num_rows`` is their sum; None reads it back from the device.
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
    """Return the units that each token must reach, each once: repetitions of an id for the same token become -1."""
    same_TKK = unit_TK.unsqueeze(2) == unit_TK.unsqueeze(1)
    return unit_TK.masked_fill(same_TKK.tril(-1).any(2), -1)
