"""Triton kernels. Taking and freeing are one program each, so the ring needs no atomics; a copy is many programs."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.paged_copy.pages import Pages

COLUMNS = 128
"""Columns of a page that a program copies."""
ENTRIES = 1024
"""Entries of a table that are handled at once."""


@triton.jit
def _take_kernel(
    ring, counters, num_rows, table, missing, num_near, num_far, length, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Take near pages first, then far ones. The rest of the table is -1."""
    rows = tl.load(num_rows).to(tl.int64)
    taken_near = tl.load(counters)
    taken_far = tl.load(counters + 2)
    left_near = tl.load(counters + 1) - taken_near
    left_far = tl.load(counters + 3) - taken_far
    needed = (rows + PAGE - 1) // PAGE
    near = tl.minimum(needed, left_near)
    far = tl.minimum(needed - near, left_far)
    for start in range(0, length, BLOCK):
        number = (start + tl.arange(0, BLOCK)).to(tl.int64)
        at = (taken_near + number) % num_near
        if num_far > 0:
            at = tl.where(number < near, at, num_near + (taken_far + number - near) % num_far)
        page = tl.load(ring + at, mask=number < near + far, other=-1)
        tl.store(table + number, page, mask=number < length)
    # Each thread has read the counters for itself, and one of them writes these.
    tl.debug_barrier()
    tl.store(counters, taken_near + near)
    tl.store(counters + 2, taken_far + far)
    tl.store(missing, tl.maximum(rows - (near + far) * PAGE, 0).to(tl.float32))


@triton.jit
def _free_kernel(ring, counters, table, num_near, num_far, length, BLOCK: tl.constexpr):
    """Put pages back into the ring. A table lists near pages first, then far ones, then -1."""
    put_near = tl.load(counters + 1)
    put_far = tl.load(counters + 3)
    near = put_near * 0
    far = put_far * 0
    for start in range(0, length, BLOCK):
        number = start + tl.arange(0, BLOCK)
        page = tl.load(table + number, mask=number < length, other=-1)
        near += tl.sum(((page >= 0) & (page < num_near)).to(tl.int64))
        far += tl.sum((page >= num_near).to(tl.int64))
    for start in range(0, length, BLOCK):
        number = (start + tl.arange(0, BLOCK)).to(tl.int64)
        page = tl.load(table + number, mask=number < length, other=-1)
        at = (put_near + number) % num_near
        if num_far > 0:
            at = tl.where(number < near, at, num_near + (put_far + number - near) % num_far)
        tl.store(ring + at, page, mask=page >= 0)
    tl.store(counters + 1, put_near + near)
    tl.store(counters + 3, put_far + far)


@triton.jit
def _copy_kernel(
    rows, near, far, table, num_rows, num_near, columns, row_stride, column_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Copy some columns of one page, into the page or, with BACK, out of it."""
    number = tl.program_id(0).to(tl.int64)
    page = tl.load(table + number)
    row = number * PAGE + tl.arange(0, PAGE)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    has_page = (row[:, None] < tl.load(num_rows)) & (column[None, :] < columns) & (page >= 0)
    at = row[:, None] * row_stride + column[None, :] * column_stride
    inside = tl.arange(0, PAGE)[:, None] * columns + column[None, :]
    is_near = page < num_near
    near_at = near + page * PAGE * columns + inside
    far_at = far + (page - num_near) * PAGE * columns + inside
    if BACK:
        # A page lies in one of the two memories; the other load yields zeros. The pool holds integers, so that a sum
        # with zero keeps every bit.
        values = tl.load(near_at, mask=has_page & is_near, other=0)
        values += tl.load(far_at, mask=has_page & (page >= num_near), other=0)
        tl.store(rows + at, values, mask=has_page)
    else:
        values = tl.load(rows + at, mask=has_page, other=0)
        tl.store(near_at, values, mask=has_page & is_near)
        tl.store(far_at, values, mask=has_page & (page >= num_near))


def take(pages: Pages, num_rows: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    """Implement ``reference.take``."""
    table = pages.ring.new_empty(pages.length_of(max_rows))
    missing = pages.near.new_empty((), dtype=torch.float32)
    _take_kernel[(1,)](
        ring=pages.ring,
        counters=pages.counters,
        num_rows=num_rows,
        table=table,
        missing=missing,
        num_near=len(pages.near),
        num_far=len(pages.far),
        length=len(table),
        PAGE=pages.page_rows,
        BLOCK=ENTRIES,
    )
    return table, missing


def store(rows_RC: Tensor, pages: Pages, table: Tensor, num_rows: Tensor) -> None:
    """Implement ``reference.store``."""
    _copy(rows_RC, pages, table, num_rows, back=False)


def load(pages: Pages, table: Tensor, num_rows: Tensor, into: Tensor) -> None:
    """Implement ``reference.load``."""
    _copy(into, pages, table, num_rows, back=True)


def free(pages: Pages, table: Tensor) -> None:
    """Implement ``reference.free``."""
    if len(table):
        _free_kernel[(1,)](
            ring=pages.ring,
            counters=pages.counters,
            table=table,
            num_near=len(pages.near),
            num_far=len(pages.far),
            length=len(table),
            BLOCK=ENTRIES,
        )


def _copy(rows_RC: Tensor, pages: Pages, table: Tensor, num_rows: Tensor, *, back: bool) -> None:
    if not rows_RC.numel():
        return
    columns = rows_RC.shape[1]
    row_stride, column_stride = rows_RC.stride()
    _copy_kernel[(len(table), triton.cdiv(columns, COLUMNS))](
        rows=rows_RC,
        near=pages.near,
        far=pages.far if len(pages.far) else pages.near,  # without far pages, an address that is never read
        table=table,
        num_rows=num_rows,
        num_near=len(pages.near),
        columns=columns,
        row_stride=row_stride,
        column_stride=column_stride,
        PAGE=pages.page_rows,
        BLOCK=COLUMNS,
        BACK=back,
    )
