"""A box names the same elements in what a rank stores and in the named tensor."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from moefw.core.errors import ContractError
from moefw.core.records import Canonical, Shard
from moefw.runtime.parallel.boxes import Box, boxes, numbers

CPU = torch.device("cpu")


def elements(box: Box) -> Tensor:
    """Return the numbers of the named tensor's elements that the box says it has, from its corner and shape alone."""
    whole = torch.arange(torch.Size(box.whole).numel()).view(box.whole)
    stored = torch.empty([part.stop - part.start for part in box.slices])
    inside = [part.stop - part.start for dim, part in enumerate(box.slices) if dim in box.dims]
    assert stored.numel() == torch.Size(inside).numel()
    return whole[tuple(slice(first, first + size) for first, size in zip(box.corner, inside, strict=True))]


def test_boxes_of_stacked_experts_split_over_ranks_are_the_parts_of_each_experts_matrix() -> None:
    """Gate and up of three experts lie in one parameter; this rank holds the second half of each along dim 0."""
    parameter = nn.Parameter(torch.arange(3 * 8 * 5.0).view(3, 8, 5))
    second = Shard(dim=0, index=1, count=2, axis="etp")
    pieces = [
        Canonical(f"{expert}.{name}", parameter, (expert, part), second)
        for expert in range(3)
        for name, part in {"gate": slice(0, 4), "up": slice(4, None)}.items()
    ]
    found = boxes(pieces)
    assert [box.name for box in found] == ["0.gate", "0.up", "1.gate", "1.up", "2.gate", "2.up"]
    for box, piece in zip(found, pieces, strict=True):
        assert box.whole == (8, 5)
        assert box.corner == (4, 0)
        assert box.of(parameter).equal(piece.of(parameter))
        assert numbers(box, CPU).view(4, 5).equal(elements(box))


def test_rows_of_a_box_are_the_rows_that_are_cut() -> None:
    parameter = nn.Parameter(torch.arange(6 * 5.0).view(6, 5))
    (upper,) = boxes([Canonical("upper", parameter, (slice(2, 6),), Shard(dim=1, index=1, count=3, axis="tp"))])
    assert upper.whole == (4, 15)
    assert upper.rows(0, 2) is None
    rows = upper.rows(1, 4)
    assert rows is not None
    assert rows.corner == (0, 5)
    rows = upper.rows(3, 5)
    assert rows is not None
    assert rows.corner == (1, 5)
    assert rows.of(parameter[3:5]).equal(parameter[3:5])
    assert numbers(rows, CPU).equal(elements(rows))


def test_a_piece_that_is_no_box_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.zeros(6, 5))
    with pytest.raises(ContractError, match=re.escape("the piece odd of a parameter is every 2th element along dim 0")):
        boxes([Canonical("odd", parameter, (slice(1, None, 2),))])
