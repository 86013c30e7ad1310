"""Arrived rows with the ids of their experts, expanded to one row for each (row, expert) and grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.permute.groups import padded
from moefw_kernels.permute.rows import RowMap, gather, gather_sum, row_map


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Mapping between N arrived rows and the rows of expert groups.

    ``rows`` maps arrived rows to grouped rows; ``slot_R = n * K + k`` is the choice of each grouped row. ``tail`` rows
    follow the last group; ``left_out`` rows exceeded the budget.
    """

    rows: RowMap
    slot_R: Tensor
    sizes: tuple[int, ...]
    counts_e: Tensor
    offsets_e: Tensor
    tail: int = 0
    left_out: int = 0

    def expand(self, rows_ND: Tensor, weights_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``rows_RD`` and ``weights_R``; padding is zero. Differentiable."""
        rows_RD = gather(rows_ND, self.rows)
        if not len(rows_ND):
            weights_R = F.pad(weights_NK.flatten(), (0, len(self.slot_R)))
        else:
            weights_R = weights_NK.flatten().index_select(0, self.slot_R)
            if self.rows.padding is not None:
                weights_R = weights_R.index_fill(0, self.rows.padding, 0)
        if not self.tail:
            return rows_RD, weights_R
        return F.pad(rows_RD, (0, 0, 0, self.tail)), F.pad(weights_R, (0, self.tail))

    def reduce(self, rows_RD: Tensor) -> Tensor:
        """Return each arrived row's sum over its experts, ``(N, D)``. Differentiable."""
        return gather_sum(rows_RD[: len(self.slot_R)], self.rows)


def arrange(
    expert_NK: Tensor,
    num_experts: int,
    *,
    alignment: int = 1,
    capacity: int = 0,
    budget: int | None = None,
    source_N: Tensor | None = None,
) -> Arrival:
    """Return the mapping to rows in order (expert, source, n, k).

    Ids outside 0..num_experts-1 get no row. Without ``source_N``, rows are already in order of source. A group has at
    least ``capacity`` rows and is padded to a multiple of ``alignment``. With a ``budget``, also such a multiple,
    there are exactly ``budget`` rows, and rows beyond are left out. Reads the counts back to the host.
    """
    num_rows, k = expert_NK.shape
    flat, device = expert_NK.flatten(), expert_NK.device
    experts = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    keys = experts
    if source_N is not None and num_rows:
        keys = experts * (source_N.max() + 1) + source_N.repeat_interleave(k)
    slots = keys.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    host: list[int] = counts.scatter_add_(0, experts, torch.ones_like(experts))[:num_experts].tolist()
    sizes = [padded(max(count, capacity), alignment) for count in host]
    ends = list(accumulate(sizes))
    slots = slots[: sum(host)].int()
    places = _places(host, sizes, device)
    left_out = 0
    if budget is not None:
        kept = places < budget
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        host = [max(0, min(count, budget - start)) for count, start in zip(host, starts, strict=True)]
        sizes = [max(0, min(size, budget - start)) for size, start in zip(sizes, starts, strict=True)]
        left_out = len(slots) - sum(host)
        slots, places = (slots[kept], places[kept]) if left_out else (slots, places)
    total = sum(sizes)
    rows, slot_R = _row_map(slots, places, total, num_rows, k)
    return Arrival(
        rows=rows,
        slot_R=slot_R,
        sizes=tuple(sizes),
        counts_e=torch.tensor(host, dtype=torch.int32, device=device),
        offsets_e=torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device),
        tail=0 if budget is None else budget - total,
        left_out=left_out,
    )


def _places(counts: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the position of each row in the padded groups; rows are in order of groups."""
    places = torch.arange(sum(counts), dtype=torch.int32, device=device)
    if list(counts) == list(sizes):
        return places
    ahead = [0, *accumulate(size - count for count, size in zip(counts, sizes, strict=True))][:-1]
    shift = torch.tensor(ahead, dtype=torch.int32, device=device).repeat_interleave(torch.tensor(counts, device=device))
    return places + shift


def _row_map(slots: Tensor, places: Tensor, total: int, num_rows: int, k: int) -> tuple[RowMap, Tensor]:
    place_of_slot = slots.new_full((num_rows * k,), -1)
    place_of_slot[slots] = places
    padding = None
    if len(slots) < total:
        slot_R = slots.new_full((total,), -1)
        slot_R[places] = slots
        padding = (slot_R < 0).nonzero().squeeze(-1)
        slots = slot_R.clamp_min(0)
    dropped = total - (0 if padding is None else len(padding)) < num_rows * k
    token_R = slots // k if k else slots
    return row_map(token_R, place_of_slot.view(num_rows, k), padding=padding, dropped=dropped), slots
