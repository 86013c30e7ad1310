"""Index arithmetic of expert groups: positions of rows that are sorted by expert, in padded groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefw_kernels.counting_sort import counting_sort
from moefw_kernels.counting_sort.reference import count, keys_of
from moefw_kernels.devices import on_device, on_host, runs_ahead
from moefw_kernels.permute.rows import RowMap, gather, gather_sum, row_map, tokens_and_rows

N = TypeVar("N", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows that arrived as chunks, grouped by expert.

    ``rows`` maps arrived rows to grouped rows; None if they are already in order, without padding. ``sizes``: None if
    the host does not know them.
    """

    rows: RowMap | None
    sizes: tuple[int, ...] | None
    counts_e: Tensor
    offsets_e: Tensor

    def regroup(self, rows_ND: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """Arrived rows and their weights in groups; padding is zero. Differentiable."""
        if self.rows is None:
            return rows_ND, weights_N
        return gather(rows_ND, self.rows), gather(weights_N.unsqueeze(-1), self.rows).squeeze(-1)

    def restore(self, rows_RD: Tensor) -> Tensor:
        """Grouped rows in the order in which they arrived, without padding. Differentiable."""
        return rows_RD if self.rows is None else gather_sum(rows_RD, self.rows)


def padded(count: N, alignment: int) -> N:
    """``count`` rounded up to a multiple of ``alignment``."""
    return -(-count // alignment) * alignment


def group_chunks(
    chunks: Sequence[Sequence[int]],
    alignment: int,
    device: torch.device,
    *,
    capacity: int = 0,
    order: Sequence[int] | None = None,
) -> Groups:
    """Regrouping of rows from order (rank, expert, token) to (expert, rank, token).

    ``chunks[rank][expert]`` is the number of rows; a group has at least ``capacity`` rows and is padded to a multiple
    of ``alignment``. If the chunks are in another order, ``order[rank]`` is the index of a rank's chunk. The host does
    not wait for the device.
    """
    chunk_Pe = np.asarray(chunks, dtype=np.int64)
    count_e = chunk_Pe.sum(0)
    size_e = padded(np.maximum(count_e, capacity), alignment)
    end_e = size_e.cumsum()
    sizes = tuple(size_e.tolist())
    is_padded = bool((size_e != count_e).any())
    is_in_order = len(chunk_Pe) == 1 or (len(sizes) == 1 and order is None)
    if is_in_order and not is_padded:
        return Groups(None, sizes, *put(device, count_e, end_e))
    by_rank = list(range(len(chunk_Pe)) if order is None else order)
    # A chunk begins where its expert's group does, behind the chunks of lower ranks for the same expert.
    begin_Pe = np.empty_like(chunk_Pe)
    begin_Pe[by_rank] = end_e - size_e + chunk_Pe[by_rank].cumsum(0) - chunk_Pe[by_rank]
    chunk_C = chunk_Pe.ravel()  # C = ranks times experts, in the order in which chunks arrived
    padding_e = size_e - count_e
    counts_e, offsets_e, row_shift_C, length_C, padding_shift_e, padding_length_e = put(
        device,
        count_e,
        end_e,
        shifts(begin_Pe.ravel(), chunk_C),
        chunk_C,
        shifts(end_e - padding_e, padding_e),
        padding_e,
    )
    num_rows = int(chunk_C.sum())
    total = sum(sizes)
    row_N = spans(row_shift_C, length_C, num_rows)
    token_R = torch.zeros(total, dtype=torch.int32, device=device)
    token_R[row_N] = torch.arange(num_rows, dtype=torch.int32, device=device)
    padding = spans(padding_shift_e, padding_length_e, total - num_rows).long() if is_padded else None
    return Groups(row_map(token_R, row_N.unsqueeze(1), padding=padding), sizes, counts_e, offsets_e)


def shifts(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """``shift`` for :func:`spans`: where each span begins, less the lengths of the spans before it."""
    before: NDArray[np.int64] = lengths.cumsum() - lengths
    return begins - before


def spans(shift: Tensor, length: Tensor, total: int) -> Tensor:
    """Numbers ``begin, begin + 1, ...`` of each span, concatenated, int32 ``(total)``.

    ``shift`` and ``length`` of each span, int32. ``total``, the sum of the lengths, comes from the host, which would
    otherwise wait for the device to learn the size of the result.
    """
    spread = shift.repeat_interleave(length, output_size=total)
    return spread.add_(torch.arange(total, dtype=torch.int32, device=shift.device))


def put(device: torch.device, *values: NDArray[np.int64]) -> Sequence[Tensor]:
    """Host values on the device, int32, through one copy for which the host does not wait."""
    if not runs_ahead(device):
        return [torch.from_numpy(array.astype(np.int32)) for array in values]
    together = on_device(torch.from_numpy(np.concatenate(values).astype(np.int32)), device)
    parts: Sequence[Tensor] = together.split([len(array) for array in values])
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Choices of tokens, sorted by expert: ``slot = token * K + k`` of each row, int32, and the map of rows to tokens.

    ``counts`` (num_experts) int64.
    """

    slot_R: Tensor
    rows: RowMap
    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sorted:
    """Choices of tokens in order (expert, token, k), before the host knows how many there are.

    ``order_N``: ``slot = token * K + k``, choices without an expert last. ``counts`` (num_experts) int64.
    """

    order_N: Tensor
    counts: Tensor
    num_tokens: int
    k: int

    def slots(self, num_rows: int) -> Slots:
        """Rows, of which there are ``num_rows``, the sum of ``counts``. The host does not wait."""
        order_N = self.order_N.int()
        token_R, row_of_slot = tokens_and_rows(order_N, num_rows, self.k)
        dropped = num_rows < self.num_tokens * self.k
        rows = row_map(token_R, row_of_slot.view(self.num_tokens, self.k), dropped=dropped)
        return Slots(order_N[:num_rows], rows, self.counts)


def count_ids(expert_TK: Tensor, num_experts: int) -> Tensor:
    """How often each expert is chosen, (num_experts) int64. Ids outside 0..num_experts-1 are not counted."""
    return count(keys_of(expert_TK.flatten(), num_experts), num_experts)


def sort_choices(expert_TK: Tensor, num_experts: int) -> Sorted:
    """Choices in order (expert, token, k), and how many each expert has.

    Ids outside 0..num_experts-1 come last and are not counted.
    """
    found = counting_sort(expert_TK.flatten(), num_experts)
    return Sorted(found.order_N, found.counts, *expert_TK.shape)


def sort_slots(expert_TK: Tensor, num_experts: int, *, num_rows: int | None = None) -> Slots:
    """Rows of a routing in order (expert, token, k). Ids outside 0..num_experts-1 get no row.

    ``counts`` (num_experts) int64 stays on the device. ``num_rows`` is their sum; None reads it back from the device.
    """
    choices = sort_choices(expert_TK, num_experts)
    if num_rows is None:
        (num_rows,) = on_host(choices.counts.sum())
    return choices.slots(num_rows)


def distinct(unit_TK: Tensor) -> Tensor:
    """Units that each token must reach, each once: repetitions of an id for the same token become -1."""
    # A choice is a repetition if an earlier one of the token, below the diagonal, is the same.
    same_TKK = unit_TK.unsqueeze(2) == unit_TK.unsqueeze(1)
    return unit_TK.masked_fill(same_TKK.tril(-1).any(2), -1)
