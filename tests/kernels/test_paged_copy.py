"""Pages of rows: the reference against a list of free pages, the kernels against it in Triton's interpreter."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from moefw_kernels import paged_copy
from moefw_kernels.paged_copy import Pages, free, load, open_pages, reference, store, take

SIZES = [(4, 1, 0), (4, 7, 0), (4, 5, 3), (1, 3, 2), (64, 4, 4), (2, 3000, 1), (2, 1, 3000)]
"""Rows of a page, pages on the device, pages on the host."""


def opened(page_rows: int, near: int, far: int, *, width: int = 5, dtype: torch.dtype = torch.int32) -> Pages:
    return open_pages(*(torch.full((count, page_rows, width), -7, dtype=dtype) for count in (near, far)))


def count(num_rows: int) -> Tensor:
    return torch.tensor([num_rows], dtype=torch.int32)[-1]


def drawn(num_rows: int, *, width: int = 5, dtype: torch.dtype = torch.int32) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(0, 100, (num_rows, width), generator=generator, dtype=dtype)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_pages_are_taken_from_a_free_list_and_put_behind_it(sizes: tuple[int, int, int]) -> None:
    page_rows, near, far = sizes
    pages, chance = opened(*sizes), random.Random(0)
    lists = deque(range(near)), deque(range(near, near + far))
    most, out = (near + far + 1) * page_rows, []
    for _ in range(60):
        if out and chance.random() < 0.5:
            table, held = out.pop(chance.randrange(len(out)))
            free(pages, table)
            for page in held:
                lists[page >= near].append(page)
            continue
        num_rows = chance.randint(0, most)
        table, missing = take(pages, count(num_rows), max_rows=most)
        held = []
        for side in lists:
            while side and len(held) * page_rows < num_rows:
                held.append(side.popleft())
        assert table.tolist() == held + [-1] * (near + far + 1 - len(held))
        assert missing == max(0, num_rows - len(held) * page_rows)
        out.append((table, held))


def test_rows_come_back_from_the_pages_that_they_were_given() -> None:
    pages = opened(4, 3, 2)
    sent = [(7, 5), (3, 3), (16, 9)]
    tables = []
    for max_rows, num_rows in sent:
        table, _ = take(pages, count(num_rows), max_rows=max_rows)
        store(drawn(max_rows), pages, table, count(num_rows))
        tables.append(table)
    for (max_rows, num_rows), table in zip(sent, tables, strict=True):
        back = torch.zeros(max_rows, 5, dtype=torch.int32)
        load(pages, table, count(num_rows), into=back)
        saved = min(num_rows, 4 * int((table >= 0).sum()))
        assert torch.equal(back[:saved], drawn(max_rows)[:saved])
        assert not back[saved:].any()


def test_nothing_else_is_written() -> None:
    pages = opened(4, 5, 0)
    first, _ = take(pages, count(4), max_rows=4)
    table, _ = take(pages, count(6), max_rows=12)
    store(drawn(12), pages, table, count(6))
    assert first.tolist() == [0]
    assert (pages.near[[0, 3, 4]] == -7).all()
    assert (pages.near[2, 2:] == -7).all()


def as_the_reference(sizes: tuple[int, int, int], width: int, dtype: torch.dtype, turned: bool) -> None:
    """Take, store, load and free in turn; memory, ring and counters agree after each."""
    from moefw_kernels.paged_copy import triton

    mine, right = (opened(*sizes, width=width, dtype=dtype) for _ in range(2))
    page_rows, near, far = sizes
    total = (near + far) * page_rows
    held: list[tuple[Tensor, Tensor, int]] = []
    for number, num_rows in enumerate((total // 3, 0, total // 2 + 1, total, 1)):
        max_rows = max(1, num_rows + number * page_rows // 2)
        rows_RC = drawn(max_rows, width=width, dtype=dtype)
        rows_RC = rows_RC.T.contiguous().T if turned else rows_RC
        table, missing = triton.take(mine, count(num_rows), max_rows)
        wanted, without = reference.take(right, count(num_rows), max_rows)
        assert torch.equal(table, wanted)
        assert torch.equal(missing, without)
        triton.store(rows_RC, mine, table, count(num_rows))
        reference.store(rows_RC, right, wanted, count(num_rows))
        held.append((rows_RC, table, num_rows))
        if number % 2:
            _, table, _ = held.pop(0)
            triton.free(mine, table)
            reference.free(right, table)
        for name in ("near", "far", "ring", "counters"):
            assert torch.equal(getattr(mine, name), getattr(right, name)), name
    for rows_RC, table, num_rows in held:
        backs = [torch.full_like(rows_RC, -1 if dtype.is_signed else 1) for _ in range(2)]
        triton.load(mine, table, count(num_rows), backs[0])
        reference.load(right, table, count(num_rows), backs[1])
        assert torch.equal(*backs)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernels(interpreter: ProcessPoolExecutor, sizes: tuple[int, int, int]) -> None:
    if sizes[1] + sizes[2] > 100:
        interpreter.submit(tables_as_the_reference, sizes).result()
        return
    for width, dtype in ((1, torch.int64), (5, torch.int32), (130, torch.int16), (17, torch.uint8)):
        for turned in (False, True):
            interpreter.submit(as_the_reference, sizes, width, dtype, turned).result()


def tables_as_the_reference(sizes: tuple[int, int, int]) -> None:
    """Tables with more entries than a program reads in one iteration, across the end of a ring."""
    from moefw_kernels.paged_copy import triton

    mine, right = opened(*sizes, width=1), opened(*sizes, width=1)
    for num_rows in (4001, 2500, 6002):
        table, _ = triton.take(mine, count(num_rows), 6002)
        assert torch.equal(table, reference.take(right, count(num_rows), 6002)[0])
        triton.free(mine, table)
        reference.free(right, table)
        assert torch.equal(mine.ring, right.ring)
        assert torch.equal(mine.counters, right.counters)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": drawn(8).float()}, r"rows are torch.float32 \(8, 5\): these pages hold torch.int32 \(R, 5\)"),
        ({"rows": drawn(8, width=4)}, r"rows are torch.int32 \(8, 4\)"),
        ({"rows": drawn(9)}, "a table of 2 pages for 9 rows: give the one that was taken, 3"),
        ({"num_rows": torch.tensor(8)}, r"torch.int64 \(\): give torch.int32 of shape \(\)"),
        ({"num_rows": torch.tensor([8], dtype=torch.int32)}, r"torch.int32 \(1,\): give"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], says: str) -> None:
    pages = opened(4, 5, 0)
    table, _ = take(pages, count(8), max_rows=8)
    rows, num_rows = change.get("rows", drawn(8)), change.get("num_rows", count(8))
    for use in (paged_copy.store, lambda *args: paged_copy.load(*args[1:], into=args[0])):
        with pytest.raises(ValueError, match=says):
            use(rows, pages, table, num_rows)


def test_pages_that_cannot_be_are_named() -> None:
    near = torch.zeros(2, 4, 5, dtype=torch.int32)
    for memory in (near[:0], near[:, :3], near.float(), near[0]):
        with pytest.raises(ValueError, match=r"give integers \(P, a power of two, C\)"):
            open_pages(memory, near)
    for memory in (near[:, :2], near.long()):
        with pytest.raises(ValueError, match="far pages are"):
            open_pages(near, memory)
