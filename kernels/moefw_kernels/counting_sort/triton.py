"""The sort in three Triton kernels: count the ids of each chunk, add up the counts of earlier chunks, place the ids.

The last also stores where each expert's places end, which needs the totals of all experts.

A place is the number of smaller ids, plus that of equal ids in earlier chunks, plus that of equal ids ahead in the
chunk, which are found by comparing all pairs. No atomics decide an order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.counting_sort.sorted_ids import SortedIds

CHUNK: Final = 512
"""Ids that are counted together: a row of counts."""
BLOCK: Final = 128
"""Ids that a program places."""
WIDTH: Final = 32
"""Ids or experts that a program compares them with at once."""
ROWS: Final = 128
"""Chunks that a program adds up at once."""
COLUMNS: Final = 16
"""Experts whose counts a program adds up."""


@triton.jit
def _key(experts, place, length, num_experts):
    """Load ids; those outside of the range, which come last, become ``num_experts``."""
    expert = tl.load(experts + place, mask=place < length, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)


@triton.jit
def _count_kernel(experts, counts, length, num_experts, stride, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Count the ids of a chunk.

    Places past the end count as ids outside of the range. These come last, so nothing lies behind them whose place
    would depend on their number.
    """
    chunk = tl.program_id(0).to(tl.int64)
    key = _key(experts, chunk * CHUNK + tl.arange(0, CHUNK), length, num_experts)
    number = tl.arange(0, BINS)
    tl.store(counts + chunk * stride + number, tl.histogram(key, BINS), mask=number < stride)


@triton.jit
def _add_up_kernel(counts, totals, narrow, chunks, num_experts, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace the counts of some experts by those of all earlier chunks, and store the totals in int64 and in int32."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, chunks, ROWS):
        chunk = (start + tl.arange(0, ROWS).to(tl.int64))[:, None]
        at = counts + chunk * stride + expert[None, :]
        count = tl.load(at, mask=chunk < chunks, other=0)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=chunk < chunks)
        total += tl.sum(count, 0)
    tl.store(totals + expert, total.to(tl.int64), mask=expert < num_experts)
    tl.store(narrow + expert, total, mask=expert < num_experts)


@triton.jit
def _place_kernel(
    experts, earlier, totals, order, ends, length, num_experts, stride,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Store the number of each id, its index in ``experts``, at its place in ``order``; the first program, the ends."""
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        total = tl.load(totals + expert, mask=expert < num_experts, other=0)
        tl.store(ends + expert, tl.cumsum(total, 0), mask=expert < num_experts)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    number = first + tl.arange(0, BLOCK)
    key = _key(experts, number, length, num_experts)
    chunk = first // CHUNK
    place = tl.load(earlier + chunk * stride + key, mask=number < length, other=0)  # equal ids in earlier chunks
    # Smaller ids, wherever they are.
    for start in range(0, num_experts, WIDTH):
        expert = start + tl.arange(0, WIDTH)
        total = tl.load(totals + expert, mask=expert < num_experts, other=0)
        place += tl.sum(tl.where(expert[None, :] < key[:, None], total[None, :], 0), 1)
    # Equal ids ahead in the chunk, of which this block is a part.
    for start in range(chunk * CHUNK, first + BLOCK, WIDTH):
        other = start + tl.arange(0, WIDTH)
        same = _key(experts, other, length, num_experts)[None, :] == key[:, None]
        place += tl.sum((same & (other[None, :] < number[:, None])).to(tl.int32), 1)
    tl.store(order + place, number.to(tl.int32), mask=number < length)


def counting_sort(expert_N: Tensor, num_experts: int) -> SortedIds:
    """Implement ``reference.counting_sort``; the places are int32."""
    expert_N = expert_N.contiguous()
    length = len(expert_N)
    chunks = triton.cdiv(length, CHUNK)
    stride = triton.cdiv(num_experts + 1, COLUMNS) * COLUMNS  # + 1: the ids outside of the range
    order = torch.empty(length, dtype=torch.int32, device=expert_N.device)
    counts = torch.empty(chunks, stride, dtype=torch.int32, device=expert_N.device)
    totals = torch.empty(num_experts, dtype=torch.int64, device=expert_N.device)
    counts_e = torch.empty(num_experts, dtype=torch.int32, device=expert_N.device)
    ends_e = torch.empty_like(counts_e)
    if length:
        bins = triton.next_power_of_2(stride)
        _count_kernel[(chunks,)](
            experts=expert_N,
            counts=counts,
            length=length,
            num_experts=num_experts,
            stride=stride,
            CHUNK=CHUNK,
            BINS=bins,
        )
    # These two also without ids: they write the totals and the ends.
    _add_up_kernel[(stride // COLUMNS,)](
        counts=counts,
        totals=totals,
        narrow=counts_e,
        chunks=chunks,
        num_experts=num_experts,
        stride=stride,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    _place_kernel[(max(1, triton.cdiv(length, BLOCK)),)](
        experts=expert_N,
        earlier=counts,
        totals=counts_e,
        order=order,
        ends=ends_e,
        length=length,
        num_experts=num_experts,
        stride=stride,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        WIDTH=WIDTH,
        EXPERTS=triton.next_power_of_2(num_experts),
    )
    return SortedIds(order, totals, counts_e, ends_e)
