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

from moefw_kernels.counting_sort import SortedIds, counting_sort
from moefw_kernels.counting_sort.reference import keys_of
from moefw_kernels.devices import on_host, runs_ahead
from moefw_kernels.permute.groups import Slots, Sorted, padded, put, shifts, spans
from moefw_kernels.permute.rows import RowMap, gather, gather_sum, row_map

MOST_PADDING: Final = 1 / 16
"""The most padding that is allocated to spare the host a read of the counts, as a share of the choices."""


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
        """``rows_RD`` and ``weights_R``; padding is zero. Differentiable."""
        rows_RD = gather(rows_ND, self.rows)
        unused = self.rows.padding if self.unused_R is None else self.unused_R
        weights_R = weights_of(weights_NK, self.slot_R, self.rows, unused)
        if not self.tail:
            return rows_RD, weights_R
        return F.pad(rows_RD, (0, 0, 0, self.tail)), F.pad(weights_R, (0, self.tail))

    def reduce(self, rows_RD: Tensor) -> Tensor:
        """Each arrived row's sum over its experts, ``(N, D)``. Differentiable."""
        return gather_sum(rows_RD[: len(self.slot_R)] if self.tail else rows_RD, self.rows)


def weights_of(weights_NK: Tensor, slot_R: Tensor, rows: RowMap, unused: Tensor | None = None) -> Tensor:
    """Weight of each row's choice, zero for ``unused`` rows, a mask or indices, and without choices. Differentiable."""
    # A choice is to this map what a token is to ``rows``: it has one row, or none.
    of_choices = RowMap(slot_R, rows.row_TK.view(-1, 1), unused, rows.dropped, bags=None)
    return gather(weights_NK.reshape(-1, 1), of_choices).squeeze(1)


def in_blocks(choices: Sorted, expert_TK: Tensor, *, num_blocks: int, room: int) -> Slots:
    """Rows of sorted choices in blocks of ``room`` rows, each of equally many experts.

    Rows of a block are in order (expert, token, k). Those beyond ``room`` are left out. What follows the last row of a
    block is undefined: it has the slot and the token 0. ``counts`` are those of ``choices``, rows that are left out
    included. The host does not wait, and on a device that it runs ahead of, no shape depends on values.
    """
    num_experts = len(choices.counts)
    experts_of_block = num_experts // num_blocks
    count_b = choices.counts.view(num_blocks, experts_of_block).sum(1)
    # Choices without an expert have key ``num_experts``, and so block ``num_blocks``, the one behind the last.
    block_N = keys_of(expert_TK.flatten(), num_experts)[choices.order_N] // experts_of_block
    places = _placed(
        choices.order_N,
        block_N,
        count_g=count_b,
        kept_g=count_b.clamp_max(room),
        begin_g=torch.arange(num_blocks, device=count_b.device) * room,
        num_rows=num_blocks * room,
    )
    slot_R = places.slot_R.clamp_min(0)
    row_TK = places.place_of_slot.view(expert_TK.shape)
    token_R = slot_R // choices.k if choices.k else slot_R
    return Slots(slot_R, row_map(token_R, row_TK, dropped=True), choices.counts)


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
    """Mapping to rows in order (expert, source, n, k).

    Ids outside 0..num_experts-1 get no row. Without ``source_N``, rows are already in order of source. A group has at
    least ``capacity`` rows and is padded to a multiple of ``alignment``. With a ``budget``, also such a multiple,
    there are exactly ``budget`` rows, and rows beyond are left out.

    The host waits only if it has to read the counts: not with ``counts``, the number of rows of each expert. Without
    ``counts_on_host``, no part needs the sizes of groups there, and they are read only if shapes depend on them: not
    with a budget, nor with ``num_rows``, the sum of the counts, if there is no padding. Where the host would wait,
    there is room for all choices instead, for a full group where there is a ``capacity``, which no expert exceeds, and
    for all padding of an ``alignment`` alone, unless that is more than ``MOST_PADDING`` of the choices: they are read.
    """
    ids = _sorted(expert_NK, num_experts, source_N)
    rule = _GroupRule(alignment, capacity, budget)
    if counts is None and not counts_on_host:
        if rule.is_plain and num_rows is not None:
            return _one_behind_another(ids, expert_NK, num_rows, sizes=None)
        arrival = _without_counts(ids, expert_NK, rule)
        if arrival is not None:
            return arrival
    if counts is None:
        (counts,) = on_host(ids.counts)
    if rule.is_plain:
        return _one_behind_another(ids, expert_NK, sum(counts), sizes=tuple(counts))
    return _in_groups(ids, expert_NK, np.asarray(counts, dtype=np.int64), rule)


@dataclass(frozen=True, slots=True)
class _GroupRule:
    """How many rows there are: the arguments of :func:`arrange`. A plain rule makes no room beyond that of choices."""

    alignment: int
    capacity: int
    budget: int | None

    @property
    def is_plain(self) -> bool:
        return self.alignment == 1 and not self.capacity and self.budget is None

    def room(self, choices: int, num_experts: int) -> int | None:
        """Number of rows that hold the padded groups of all choices, wherever these go.

        None: nothing is padded, or there may be more padding than ``MOST_PADDING``.
        """
        if self.capacity:
            return num_experts * padded(self.capacity, self.alignment)
        # Each group that has rows adds at most ``alignment - 1`` rows of padding.
        padding = min(num_experts, choices) * (self.alignment - 1)
        if not padding or padding > MOST_PADDING * choices:
            return None
        return (choices + padding) // self.alignment * self.alignment


def _one_behind_another(ids: SortedIds, expert_NK: Tensor, num_rows: int, *, sizes: tuple[int, ...] | None) -> Arrival:
    """Mapping of the first ``num_rows`` slots in order to a row each. Groups have no padding."""
    in_order = Sorted(ids.order_N, ids.counts, *expert_NK.shape).slots(num_rows)
    return Arrival(in_order.rows, in_order.slot_R, sizes, ids.counts_e, ids.ends_e)


def _without_counts(ids: SortedIds, expert_NK: Tensor, rule: _GroupRule) -> Arrival | None:
    """Mapping whose shapes hold whatever the counts are, which spares the host from waiting for them.

    None: the host has to read them, or need not wait where it does.
    """
    num_slots = len(ids.order_N)
    waits = runs_ahead(ids.order_N.device)
    budget = rule.budget
    if budget is None and waits:
        budget = rule.room(num_slots, len(ids.counts))
    if budget is not None:
        return _within_budget(ids, expert_NK, rule, budget)
    if rule.is_plain and waits:
        return _with_room_for_all(ids, expert_NK)
    return None


def _with_room_for_all(ids: SortedIds, expert_NK: Tensor) -> Arrival:
    """Mapping of slots in order to a row for each of them: those without an expert are past the last end."""
    slots = ids.order_N
    end = ids.ends_e[-1:]
    in_order = Sorted(slots, ids.counts, *expert_NK.shape).slots(len(slots))
    row_NK = torch.where(in_order.rows.row_TK < end, in_order.rows.row_TK, -1)
    unused_R = torch.arange(len(slots), device=slots.device) >= end
    rows = row_map(in_order.rows.token_R, row_NK, dropped=True)
    return Arrival(rows, in_order.slot_R, None, ids.counts_e, ids.ends_e, unused_R=unused_R)


def _sorted(expert_NK: Tensor, num_experts: int, source_N: Tensor | None) -> SortedIds:
    """Slots ``n * K + k`` in order (expert, source, n, k), and the number of rows of each expert."""
    if source_N is None or not expert_NK.numel():
        return counting_sort(expert_NK.flatten(), num_experts)
    # Sort by source first; the sort by expert is stable and keeps that order within an expert.
    k = expert_NK.shape[1]
    by_source_N = source_N.argsort(stable=True)
    ids = counting_sort(expert_NK.index_select(0, by_source_N).flatten(), num_experts)
    order = ids.order_N
    return ids._replace(order_N=by_source_N.index_select(0, order // k) * k + order % k)


def _in_groups(ids: SortedIds, expert_NK: Tensor, count_e: NDArray[np.int64], rule: _GroupRule) -> Arrival:
    """Mapping of slots in order to padded groups, whose sizes the host knows."""
    slots = ids.order_N
    budget = rule.budget
    size_e = padded(np.maximum(count_e, rule.capacity), rule.alignment)
    begin_e = size_e.cumsum() - size_e
    num_choices = int(count_e.sum())
    if budget is not None:
        # The group in which the budget ends is cut there, and those behind it become empty. So the rows that stay are
        # the first ones in order, and no group moves.
        room_e = np.maximum(budget - begin_e, 0)
        count_e = np.minimum(count_e, room_e)
        size_e = np.minimum(size_e, room_e)
    padding_e = size_e - count_e
    num_rows = int(count_e.sum())
    total = int(size_e.sum())
    tables = [count_e, size_e.cumsum()]
    is_padded = num_rows < total
    if is_padded:
        tables += [shifts(begin_e, count_e), shifts(begin_e + count_e, padding_e), padding_e]
    counts_e, offsets_e, *of_padding = put(slots.device, *tables)
    places = None
    padding = None
    if is_padded:
        row_shift_e, padding_shift_e, padding_length_e = of_padding
        places = spans(row_shift_e, counts_e, num_rows)
        padding = spans(padding_shift_e, padding_length_e, total - num_rows).long()
    rows, slot_R = _row_map(slots[:num_rows].int(), places, padding, expert_NK.shape)
    return Arrival(
        rows=rows,
        slot_R=slot_R,
        sizes=tuple(size_e.tolist()),
        counts_e=counts_e,
        offsets_e=offsets_e,
        left_out=None if budget is None else torch.full((), num_choices - num_rows, device=slots.device),
        tail=0 if budget is None else budget - total,
    )


def _row_map(
    slots: Tensor, places: Tensor | None, padding: Tensor | None, shape_NK: torch.Size
) -> tuple[RowMap, Tensor]:
    """Map of slots in order to rows, and the slot of each row, 0 for padding.

    ``places``: the row of each slot; None: the first slot has row 0, the next one row 1, and so on. ``padding``: the
    other rows; None: there are none.
    """
    num_arrived, k = shape_NK
    dropped = len(slots) < num_arrived * k
    if places is None:
        places = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    place_of_slot = slots.new_full((num_arrived * k,), -1)
    place_of_slot[slots] = places
    slot_R = slots
    if padding is not None:
        slot_R = slots.new_zeros(len(slots) + len(padding))
        slot_R[places] = slots
    token_R = slot_R // k if k else slot_R
    return row_map(token_R, place_of_slot.view(num_arrived, k), padding=padding, dropped=dropped), slot_R


def _within_budget(ids: SortedIds, expert_NK: Tensor, rule: _GroupRule, budget: int) -> Arrival:
    """Mapping of slots in order to groups within the budget. The host does not wait.

    No shape depends on values on a device that the host runs ahead of. All rows that come from nowhere are padding,
    those behind the last group included. It is the arithmetic of ``_in_groups``, on the device.
    """
    slots = ids.order_N
    count_e = ids.counts
    k = expert_NK.shape[1]
    size_e = -(-count_e.clamp_min(rule.capacity) // rule.alignment) * rule.alignment
    begin_e = size_e.cumsum(0) - size_e
    room_e = (budget - begin_e).clamp_min(0)
    kept_e = torch.minimum(count_e, room_e)
    expert_N = keys_of(expert_NK.flatten(), len(count_e))[slots]
    places = _placed(slots, expert_N, count_g=count_e, kept_g=kept_e, begin_g=begin_e, num_rows=budget)
    padding = places.slot_R < 0
    slot_R = places.slot_R.clamp_min(0)
    token_R = slot_R // k if k else slot_R
    return Arrival(
        rows=row_map(token_R, places.place_of_slot.view(expert_NK.shape), padding=padding, dropped=True),
        slot_R=slot_R,
        sizes=None,
        counts_e=kept_e.int(),
        offsets_e=torch.minimum(size_e, room_e).cumsum(0, dtype=torch.int32),
        left_out=(count_e - kept_e).sum(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The row of each slot ``(N * K)`` and the slot of each row ``(R)``, int32; -1: none."""

    place_of_slot: Tensor
    slot_R: Tensor


def _placed(
    slots: Tensor, group_N: Tensor, *, count_g: Tensor, kept_g: Tensor, begin_g: Tensor, num_rows: int
) -> _Places:
    """Places of slots in order, of which the first ``kept_g`` of each group lie from row ``begin_g`` on.

    ``count_g``: how many slots each group has. ``group_N``: the group of each slot in order, the number behind the last
    group for slots of none.
    """
    first_g = count_g.cumsum(0) - count_g
    number_N = torch.arange(len(slots), device=slots.device)
    # An entry of zero for slots of no group: none of their numbers is below it, so none of them fits.
    no_group = (0, 1)
    fits_N = number_N < F.pad(first_g + kept_g, no_group)[group_N]
    place_N = number_N + F.pad(begin_g - first_g, no_group)[group_N]
    place_of_slot = slots.new_empty(len(slots), dtype=torch.int32)
    place_of_slot[slots] = torch.where(fits_N, place_N, -1).int()
    # One row more, into which all slots that do not fit are written: to select the others would take a shape that
    # depends on values.
    slot_R = slots.new_full((num_rows + 1,), -1, dtype=torch.int32)
    slot_R[torch.where(fits_N, place_N, num_rows)] = slots.int()
    return _Places(place_of_slot, slot_R[:num_rows])
