"""Rows that wait in pages of a pool, whose free pages are known to the device alone; see the README beside."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.paged_copy import reference
from moefw_kernels.paged_copy.pages import Pages, open_pages

__all__ = ["Pages", "free", "load", "open_pages", "store", "take"]


def take(pages: Pages, num_rows: Tensor, *, max_rows: int) -> tuple[Tensor, Tensor]:
    """Return which pages are for rows of now on, and how many of the rows find none.

    Args:
        pages: From which they are taken, those that are near first.
        num_rows: How many rows there are, int32 of shape (), on the device and read there alone.
        max_rows: The most they can be.

    Returns:
        The table, int64 ``(ceil(max_rows / page_rows),)``: the page of each ``page_rows`` rows, -1 where there are no
        rows or no page is left; and fp32 of shape (), the rows without a page, which are the last ones.

    Raises:
        ValueError: A number of rows of another dtype or shape.
    """
    _check_count(num_rows)
    if not pages.ring.is_cuda:
        return reference.take(pages, num_rows, max_rows)
    from moefw_kernels.paged_copy import triton

    return triton.take(pages, num_rows, max_rows)


def store(rows_RC: Tensor, pages: Pages, table: Tensor, num_rows: Tensor) -> None:
    """Copy the first ``num_rows`` rows into the pages of ``table``; those without a page are left out.

    Args:
        rows_RC: ``(R, C)`` of any strides, in the pool's dtype; rows past ``num_rows`` are not read.
        pages: The pool, of rows of C.
        table: What :func:`take` returned for ``max_rows`` of R.
        num_rows: What it was given.

    Raises:
        ValueError: Rows of another dtype or width than the pool's, or a table for another number of them.
    """
    _check(rows_RC, pages, table, num_rows)
    if not rows_RC.is_cuda:
        return reference.store(rows_RC, pages, table, num_rows)
    from moefw_kernels.paged_copy import triton

    return triton.store(rows_RC, pages, table, num_rows)


def load(pages: Pages, table: Tensor, num_rows: Tensor, *, into: Tensor) -> None:
    """Copy rows back into ``into``, ``(R, C)``; arguments and errors as in :func:`store`.

    Rows past ``num_rows``, and those without a page, are not written.
    """
    _check(into, pages, table, num_rows)
    if not into.is_cuda:
        return reference.load(pages, table, num_rows, into)
    from moefw_kernels.paged_copy import triton

    return triton.load(pages, table, num_rows, into)


def free(pages: Pages, table: Tensor) -> None:
    """Give the pages of a table back, once."""
    if not pages.ring.is_cuda:
        return reference.free(pages, table)
    from moefw_kernels.paged_copy import triton

    return triton.free(pages, table)


def _check_count(num_rows: Tensor) -> None:
    if num_rows.dtype is not torch.int32 or num_rows.ndim:
        given = f"{num_rows.dtype} {tuple(num_rows.shape)}"
        raise ValueError(f"the number of rows is {given}: give torch.int32 of shape (), on the device")


def _check(rows_RC: Tensor, pages: Pages, table: Tensor, num_rows: Tensor) -> None:
    _check_count(num_rows)
    width, dtype = pages.near.shape[-1], pages.near.dtype
    if rows_RC.ndim != 2 or rows_RC.shape[1] != width or rows_RC.dtype is not dtype:
        raise ValueError(f"rows are {rows_RC.dtype} {tuple(rows_RC.shape)}: these pages hold {dtype} (R, {width})")
    if len(table) != pages.length_of(len(rows_RC)):
        wanted = pages.length_of(len(rows_RC))
        raise ValueError(
            f"a table of {len(table)} pages for {len(rows_RC)} rows: give the one that was taken, {wanted}"
        )
