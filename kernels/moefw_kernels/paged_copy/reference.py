"""Pool operations in plain PyTorch, for host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.paged_copy.pages import Pages


def take(pages: Pages, num_rows: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    """Implement ``moefw_kernels.paged_copy.take``."""
    size = pages.page_rows
    left_near, left_far = pages.counters[:, 1] - pages.counters[:, 0]
    needed = (num_rows + size - 1) // size
    near = torch.minimum(needed, left_near)
    taken = near + torch.minimum(needed - near, left_far)
    number = torch.arange(pages.length_of(max_rows), device=num_rows.device)
    place = _places(pages, number, near, side=0)
    table = torch.where(number < taken, pages.ring[place], -1)
    pages.counters[:, 0] += torch.stack([near, taken - near])
    return table, (num_rows - taken * size).clamp_min(0).float()


def store(rows_RC: Tensor, pages: Pages, table: Tensor, num_rows: Tensor) -> None:
    """Implement ``moefw_kernels.paged_copy.store``."""
    for memory, rows, places in _sides(pages, table, num_rows, len(rows_RC)):
        memory.flatten(0, 1)[places] = rows_RC[rows]


def load(pages: Pages, table: Tensor, num_rows: Tensor, into: Tensor) -> None:
    """Implement ``moefw_kernels.paged_copy.load``."""
    for memory, rows, places in _sides(pages, table, num_rows, len(into)):
        into[rows] = memory.flatten(0, 1)[places]


def free(pages: Pages, table: Tensor) -> None:
    """Implement ``moefw_kernels.paged_copy.free``."""
    near = ((table >= 0) & (table < len(pages.near))).sum()
    taken = (table >= 0).sum()
    number = torch.arange(len(table), device=table.device)
    place = _places(pages, number, near, side=1)
    pages.ring[place[table >= 0]] = table[table >= 0]
    pages.counters[:, 1] += torch.stack([near, taken - near])


def _places(pages: Pages, number: Tensor, near: Tensor, *, side: int) -> Tensor:
    """Ring positions of the entries ``number`` of a table whose first ``near`` pages are near ones.

    ``side``: 0 to take pages, 1 to put them back.
    """
    num_near = len(pages.near)
    num_far = len(pages.far)
    start_near, start_far = pages.counters[:, side]
    far = num_near + (start_far + number - near) % max(num_far, 1)
    return torch.where(number < near, (start_near + number) % num_near, far.clamp_max(num_near + num_far - 1))


def _sides(pages: Pages, table: Tensor, num_rows: Tensor, max_rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return, for the near and the far memory, the rows that have a page there and their positions in it."""
    row = torch.arange(max_rows, device=table.device)
    page = table.repeat_interleave(pages.page_rows)[:max_rows].where(row < num_rows, -1)
    place = row % pages.page_rows
    num_near = len(pages.near)
    near = (page >= 0) & (page < num_near)
    far = page >= num_near
    return [
        (pages.near, row[near], page[near] * pages.page_rows + place[near]),
        (pages.far, row[far], (page[far] - num_near) * pages.page_rows + place[far]),
    ]
