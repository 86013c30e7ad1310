"""Copies of rows into pages of a pool and back. Only the device knows the free pages; see README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.paged_copy import reference
from moefw_kernels.paged_copy.pages import Pages, open_pages

__all__ = ["Pages", "free", "load", "open_pages", "store", "take"]


def take(pages: Pages, num_rows: Tensor, *, max_rows: int) -> tuple[Tensor, Tensor]:
    """Take pages for rows, and return their table and the number of rows that get no page.

    Args:
        pages: The pool. Near pages are taken first.
        num_rows: The number of rows, int32 of shape (), read only on the device.
        max_rows: The largest possible number of rows.

    Returns:
        The table, int64 ``(ceil(max_rows / page_rows),)``: the page of each ``page_rows`` rows, -1 where there are no
        rows or no page is left; and fp32 of shape (), the number of rows without a page, which are the last ones.

    Raises:
        ValueError: A number of rows of another dtype or shape.
    """
    _check_count(num_rows)
    if not takes_kernels(pages.ring):
        return reference.take(pages, num_rows, max_rows)
    from moefw_kernels.paged_copy import triton

    return triton.take(pages, num_rows, max_rows)


def store(rows_RC: Tensor, pages: Pages, table: Tensor, num_rows: Tensor) -> None:
    """Copy the first ``num_rows`` rows into the pages of ``table``; rows without a page are skipped.

    Args:
        rows_RC: ``(R, C)`` of any strides, in the pool's dtype; rows past ``num_rows`` are not read.
        pages: The pool, of rows of C.
        table: The table that :func:`take` returned for ``max_rows`` of R.
        num_rows: The ``num_rows`` that :func:`take` was given.

    Raises:
        ValueError: Rows of another dtype or width than the pool's, or a table for another number of rows.
    """
    _check(rows_RC, pages, table, num_rows)
    if not takes_kernels(rows_RC):
        return reference.store(rows_RC, pages, table, num_rows)
    from moefw_kernels.paged_copy import triton

    return triton.store(rows_RC, pages, table, num_rows)


def load(pages: Pages, table: Tensor, num_rows: Tensor, *, into: Tensor) -> None:
    """Copy rows back into ``into``, ``(R, C)``; arguments and errors as in :func:`store`.

    Rows past ``num_rows`` and rows without a page are not written.
    """
    _check(into, pages, table, num_rows)
    if not takes_kernels(into):
        return reference.load(pages, table, num_rows, into)
    from moefw_kernels.paged_copy import triton

    return triton.load(pages, table, num_rows, into)


def free(pages: Pages, table: Tensor) -> None:
    """Give the pages of a table back to the pool. Call it once for each table."""
    if not takes_kernels(pages.ring):
        return reference.free(pages, table)
    from moefw_kernels.paged_copy import triton

    return triton.free(pages, table)


def _check_count(num_rows: Tensor) -> None:
    if num_rows.dtype is not torch.int32 or num_rows.ndim:
        raise ValueError(
            f"the number of rows is {num_rows.dtype} {tuple(num_rows.shape)}: "
            "give torch.int32 of shape (), on the device"
        )


def _check(rows_RC: Tensor, pages: Pages, table: Tensor, num_rows: Tensor) -> None:
    _check_count(num_rows)
    width = pages.near.shape[-1]
    dtype = pages.near.dtype
    if rows_RC.ndim != 2 or rows_RC.shape[1] != width or rows_RC.dtype is not dtype:
        raise ValueError(f"rows are {rows_RC.dtype} {tuple(rows_RC.shape)}: these pages hold {dtype} (R, {width})")
    length = pages.length_of(len(rows_RC))
    if len(table) != length:
        raise ValueError(
            f"a table of {len(table)} pages for {len(rows_RC)} rows: give the one that was taken, {length}"
        )
