"""Arrived rows with the ids of their experts, expanded to one row for each (row, expert) and grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.counting_sort import counting_sort
from moefw_kernels.counting_sort.reference import keys_of
from moefw_kernels.devices import on_host, runs_ahead
from moefw_kernels.permute.groups import Slots, Sorted, padded, put, shifts, spans
from moefw_kernels.permute.rows import RowMap, clear, counts_and_ends, gather, gather_sum, row_map

MOST_PADDING: Final = 1 / 16
"""The most rows of padding for which there is room without a look at the groups, as a share of the choices."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Mapping between N arrived rows and the rows of expert groups.

    ``rows`` maps arrived rows to grouped rows; ``slot_R = n * K + k`` is the choice of each grouped row. ``tail`` rows
    follow the last group; ``left_out``, int64 of shape (), exceeded the budget, if there is one. ``sizes``: None if the
    host does not know them; ``unused_R``, bool, are then rows past the last group, if they are no padding.
    """

    rows: RowMap
    slot_R: Tensor
    sizes: tuple[int, ...] | None
    counts_e: Tensor
    offsets_e: Tensor
    left_out: Tensor | None = None
    tail: int = 0
    unused_R: Tensor | None = None

    def expand(self, rows_ND: Tensor, weights_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``rows_RD`` and ``weights_R``; padding is zero. Differentiable."""
        rows_RD, weights_R = gather(rows_ND, self.rows), weights_of(weights_NK, self.slot_R)
        if (unused := self.rows.padding if self.unused_R is None else self.unused_R) is not None:
            weights_R = clear(weights_R, unused)
        if not self.tail:
            return rows_RD, weights_R
        return F.pad(rows_RD, (0, 0, 0, self.tail)), F.pad(weights_R, (0, self.tail))

    def reduce(self, rows_RD: Tensor) -> Tensor:
        """Return each arrived row's sum over its experts, ``(N, D)``. Differentiable."""
        return gather_sum(rows_RD[: len(self.slot_R)] if self.tail else rows_RD, self.rows)


def weights_of(weights_NK: Tensor, slot_R: Tensor) -> Tensor:
    """Return the weight of each row's choice, zero where there are no choices at all. Differentiable."""
    weights = weights_NK.flatten()
    return weights.index_select(0, slot_R) if weights.numel() else F.pad(weights, (0, len(slot_R)))


def in_blocks(found: Sorted, expert_TK: Tensor, *, num_blocks: int, room: int) -> Slots:
    """Return the rows of sorted choices in blocks of ``room`` rows, each of equally many experts.

    Rows of a block are in order (expert, token, k). Those beyond ``room`` are left out. What follows the last row of a
    block is undefined: it has the slot and the token 0. ``counts`` are those of ``found``. The host does not wait, and
    on a device that it runs ahead of, no shape depends on values.
    """
    each = len(found.counts) // num_blocks
    count_b = found.counts.view(num_blocks, each).sum(1)
    block_N = keys_of(expert_TK.flatten(), len(found.counts))[found.order_N] // each
    begin_b = torch.arange(num_blocks, device=count_b.device) * room
    places = _placed(found.order_N, block_N, count_b, count_b.clamp_max(room), begin_b, num_blocks * room)
    slot_R = places.slot_R.clamp_min(0)
    row_TK = places.place_of_slot.view(expert_TK.shape)
    token_R = slot_R // found.k if found.k else slot_R
    return Slots(slot_R, row_map(token_R, row_TK, dropped=True), found.counts)


def arrange(
    expert_NK: Tensor,
    num_experts: int,
    *,
    alignment: int = 1,
    capacity: int = 0,
    budget: int | None = None,
    source_N: Tensor | None = None,
    counts: Sequence[int] | None = None,
    num_rows: int | None = None,
    counts_on_host: bool = True,
) -> Arrival:
    """Return the mapping to rows in order (expert, source, n, k).

    Ids outside 0..num_experts-1 get no row. Without ``source_N``, rows are already in order of source. A group has at
    least ``capacity`` rows and is padded to a multiple of ``alignment``. With a ``budget``, also such a multiple,
    there are exactly ``budget`` rows, and rows beyond are left out.

    The host waits only if it has to read the counts: not with ``counts``, the number of rows of each expert. Without
    ``counts_on_host``, no part needs the sizes of groups there, and they are read only if shapes depend on them: not
    with a budget, nor with ``num_rows``, the sum of the counts, if there is no padding. Where the host would wait,
    there is room for all choices instead, for a full group where there is a ``capacity``, which no expert exceeds, and
    for all padding of an ``alignment`` alone, unless that is more than ``MOST_PADDING`` of the choices: they are read.
    """
    num_arrived, k = expert_NK.shape
    arrived = num_arrived, k
    slots, found = _sorted(expert_NK, num_experts, source_N)
    is_plain = alignment == 1 and not capacity and budget is None
    reads = counts is None and (counts_on_host or not is_plain or num_rows is None)
    if reads and not counts_on_host:
        waits = runs_ahead(slots.device)
        if budget is None and waits:
            budget = _room(len(slots), num_experts, alignment, capacity)
        if budget is not None:
            return _within_budget(slots, expert_NK, found, alignment, capacity, budget, arrived)
        if is_plain and waits:
            return _with_room_for_all(slots, found, arrived)
    if reads:
        (counts,) = on_host(found)
    if not is_plain:
        assert counts is not None
        return _in_groups(slots, np.asarray(counts, dtype=np.int64), alignment, capacity, budget, arrived)
    sizes = None if counts is None else tuple(counts)
    num_rows = num_rows if sizes is None else sum(sizes)
    assert num_rows is not None
    of_rows = Sorted(slots, found, *arrived).slots(num_rows)
    return Arrival(of_rows.rows, of_rows.slot_R, sizes, *counts_and_ends(found))


def _room(choices: int, num_experts: int, alignment: int, capacity: int) -> int | None:
    """Return rows that hold the padded groups of all choices. None: nothing is padded, or padding may be much."""
    if capacity:
        return num_experts * padded(capacity, alignment)
    padding = min(num_experts, choices) * (alignment - 1)
    if not padding or padding > MOST_PADDING * choices:
        return None
    return (choices + padding) // alignment * alignment


def _with_room_for_all(slots: Tensor, found: Tensor, arrived: tuple[int, int]) -> Arrival:
    """Return the mapping of slots in order to a row for each of them: those without an expert are past the last end."""
    counts_e, ends_e = counts_and_ends(found)
    of_rows, end = Sorted(slots, found, *arrived).slots(len(slots)), ends_e[-1:]
    row_NK = torch.where(of_rows.rows.row_TK < end, of_rows.rows.row_TK, -1)
    unused_R = torch.arange(len(slots), device=slots.device) >= end
    rows = row_map(of_rows.rows.token_R, row_NK, dropped=True)
    return Arrival(rows, of_rows.slot_R, None, counts_e, ends_e, unused_R=unused_R)


def _sorted(expert_NK: Tensor, num_experts: int, source_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the slots in order (expert, source, n, k), and the counts."""
    if source_N is None or not expert_NK.numel():
        return counting_sort(expert_NK.flatten(), num_experts)
    by_source_N, k = source_N.argsort(stable=True), expert_NK.shape[1]
    order, found = counting_sort(expert_NK.index_select(0, by_source_N).flatten(), num_experts)
    return by_source_N.index_select(0, order // k) * k + order % k, found


def _in_groups(
    slots: Tensor,
    count_e: NDArray[np.int64],
    alignment: int,
    capacity: int,
    budget: int | None,
    arrived: tuple[int, int],
) -> Arrival:
    """Return the mapping of slots in order to padded groups, whose sizes the host knows."""
    size_e = padded(np.maximum(count_e, capacity), alignment)
    begin_e, wanted = size_e.cumsum() - size_e, int(count_e.sum())
    if budget is not None:
        room_e = np.maximum(budget - begin_e, 0)
        count_e, size_e = np.minimum(count_e, room_e), np.minimum(size_e, room_e)
    extra_e, num_rows, total = size_e - count_e, int(count_e.sum()), int(size_e.sum())
    places = padding = None
    about: list[NDArray[np.int64]] = [count_e, size_e.cumsum()]
    if num_rows < total:
        about += [shifts(begin_e, count_e), shifts(begin_e + count_e, extra_e), extra_e]
    counts_e, offsets_e, *more = put(slots.device, *about)
    if more:
        places, padding = spans(more[0], counts_e, num_rows), spans(more[1], more[2], total - num_rows).long()
    rows, slot_R = _row_map(slots[:num_rows].int(), places, padding, arrived)
    return Arrival(
        rows=rows,
        slot_R=slot_R,
        sizes=tuple(size_e.tolist()),
        counts_e=counts_e,
        offsets_e=offsets_e,
        left_out=None if budget is None else torch.full((), wanted - num_rows, device=slots.device),
        tail=0 if budget is None else budget - total,
    )


def _row_map(
    slots: Tensor, places: Tensor | None, padding: Tensor | None, arrived: tuple[int, int]
) -> tuple[RowMap, Tensor]:
    """Return the map of slots in order, and the slot of each row; without ``places`` and ``padding`` they are alike."""
    num_arrived, k = arrived
    dropped = len(slots) < num_arrived * k
    at = torch.arange(len(slots), dtype=torch.int32, device=slots.device) if places is None else places
    place_of_slot = slots.new_full((num_arrived * k,), -1)
    place_of_slot[slots] = at
    if padding is not None:
        slot_R = slots.new_zeros(len(slots) + len(padding))
        slot_R[at] = slots
        slots = slot_R
    token_R = slots // k if k else slots
    return row_map(token_R, place_of_slot.view(num_arrived, k), padding=padding, dropped=dropped), slots


def _within_budget(
    slots: Tensor,
    expert_NK: Tensor,
    count_e: Tensor,
    alignment: int,
    capacity: int,
    budget: int,
    arrived: tuple[int, int],
) -> Arrival:
    """Return the mapping of slots in order to groups within the budget. The host does not wait.

    No shape depends on values on a device that the host runs ahead of.
    All rows that come from nowhere are padding, those behind the last group included.
    """
    size_e = -(-count_e.clamp_min(capacity) // alignment) * alignment
    begin_e = size_e.cumsum(0) - size_e
    room_e = (budget - begin_e).clamp_min(0)
    kept_e = torch.minimum(count_e, room_e)
    expert_N = keys_of(expert_NK.flatten(), len(count_e))[slots]
    places = _placed(slots, expert_N, count_e, kept_e, begin_e, budget)
    padding, slot_R = places.slot_R < 0, places.slot_R.clamp_min(0)
    row_TK, token_R = places.place_of_slot.view(arrived), slot_R // arrived[1] if arrived[1] else slot_R
    return Arrival(
        rows=row_map(token_R, row_TK, padding=padding, dropped=True),
        slot_R=slot_R,
        sizes=None,
        counts_e=kept_e.int(),
        offsets_e=torch.minimum(size_e, room_e).cumsum(0, dtype=torch.int32),
        left_out=(count_e - kept_e).sum(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The row of each slot and the slot of each row, int32; -1: none."""

    place_of_slot: Tensor
    slot_R: Tensor


def _placed(slots: Tensor, group_N: Tensor, count_g: Tensor, kept_g: Tensor, begin_g: Tensor, num_rows: int) -> _Places:
    """Place the first ``kept_g`` slots of each group from ``begin_g`` on. ``group_N``: the group of each slot in order.

    Slots of no group have the number behind the last one.
    """
    first_g = count_g.cumsum(0) - count_g
    number_N = torch.arange(len(slots), device=slots.device)
    nowhere = (0, 1)  # an entry for choices without a group
    fits_N = number_N < F.pad(first_g + kept_g, nowhere)[group_N]
    place_N = number_N + F.pad(begin_g - first_g, nowhere)[group_N]
    place_of_slot = slots.new_empty(len(slots), dtype=torch.int32)
    place_of_slot[slots] = torch.where(fits_N, place_N, -1).int()
    slot_R = slots.new_full((num_rows + 1,), -1, dtype=torch.int32)
    slot_R[torch.where(fits_N, place_N, num_rows)] = slots.int()
    return _Places(place_of_slot, slot_R[:num_rows])
