"""One number for each group of rows."""

from __future__ import annotations

import torch

from moefw_kernels.quantize import group_amax, group_of_row

ENDS = torch.tensor([3, 3, 7, 8], dtype=torch.int32)


def test_each_row_belongs_to_the_group_in_which_it_lies() -> None:
    assert group_of_row(ENDS, 10).tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 4, 4]
    assert group_of_row(ENDS, 0).tolist() == []


def test_a_groups_magnitude_is_that_of_its_rows_alone() -> None:
    """Empty groups have none, and what lies past the last group is not looked at."""
    x = torch.randn(10, 5, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    x[8:] = torch.nan
    wanted = [x[0:3].abs().max().item(), 0.0, x[3:7].abs().max().item(), x[7].abs().max().item()]
    assert group_amax(x, ENDS).tolist() == wanted
    assert group_amax(x[:0], torch.zeros(2, dtype=torch.int32)).tolist() == [0.0, 0.0]


def test_a_nan_does_not_hide() -> None:
    x = torch.ones(8, 2)
    x[4, 1] = torch.nan
    assert group_amax(x, ENDS).isnan().tolist() == [False, False, True, False]
