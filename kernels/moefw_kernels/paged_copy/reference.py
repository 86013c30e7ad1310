"""Pool operations in plain PyTorch, for host memory. No shape depends on a value, as in the kernels."""

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
    for memory, is_there, place in _sides(pages, table, num_rows, len(rows_RC)):
        places = memory.flatten(0, 1)
        # Rows without a place there repeat what one with a place writes; if none has, what the first place holds.
        one = is_there.int().argmax(0, keepdim=True)
        same_place = place[one].where(is_there[one], 0)
        same_row = torch.where(is_there[one].unsqueeze(1), rows_RC[one], places[:1])
        places[place.where(is_there, same_place)] = torch.where(is_there.unsqueeze(1), rows_RC, same_row)


def load(pages: Pages, table: Tensor, num_rows: Tensor, into: Tensor) -> None:
    """Implement ``moefw_kernels.paged_copy.load``."""
    for memory, is_there, place in _sides(pages, table, num_rows, len(into)):
        places = memory.flatten(0, 1)
        found = places[place.where(is_there, 0)]
        into.copy_(torch.where(is_there.unsqueeze(1), found, into))


def free(pages: Pages, table: Tensor) -> None:
    """Implement ``moefw_kernels.paged_copy.free``."""
    near = ((table >= 0) & (table < len(pages.near))).sum()
    taken = (table >= 0).sum()
    number = torch.arange(len(table), device=table.device)
    place = _places(pages, number, near, side=1)
    # Entries without a page go behind the last place.
    longer = torch.cat([pages.ring, pages.ring[:1]])
    longer[place.where(table >= 0, len(pages.ring))] = table
    pages.ring.copy_(longer[:-1])
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
    """Return, for each memory that has pages, whether a row has one there, and its position in it."""
    row = torch.arange(max_rows, device=table.device)
    page = table.repeat_interleave(pages.page_rows)[:max_rows].where(row < num_rows, -1)
    place = row % pages.page_rows
    num_near = len(pages.near)
    is_near = (page >= 0) & (page < num_near)
    is_far = page >= num_near
    sides = [
        (pages.near, is_near, page * pages.page_rows + place),
        (pages.far, is_far, (page - num_near) * pages.page_rows + place),
    ]
    return [side for side in sides if len(side[0])]
