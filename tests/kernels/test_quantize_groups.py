"""One number for each group of rows."""

from __future__ import annotations

import pytest
import torch

from moefw_kernels.quantize import group_amax, group_of_row, quantize_nvfp4
from moefw_kernels.random import token_keys

ENDS = torch.tensor([3, 3, 7, 8], dtype=torch.int32)


def test_each_row_belongs_to_the_group_in_which_it_lies() -> None:
    assert group_of_row(ENDS, 10).tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 4, 4]
    assert group_of_row(ENDS, 0).tolist() == []


def test_a_groups_magnitude_is_that_of_its_rows_alone() -> None:
    """Empty groups have magnitude 0, and rows past the last group are ignored."""
    x = torch.randn(10, 5, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    x[8:] = torch.nan
    wanted = [x[0:3].abs().max().item(), 0.0, x[3:7].abs().max().item(), x[7].abs().max().item()]
    assert group_amax(x, ENDS).tolist() == wanted
    assert group_amax(x[:0], torch.zeros(2, dtype=torch.int32)).tolist() == [0.0, 0.0]


def test_a_nan_does_not_hide() -> None:
    x = torch.ones(8, 2)
    x[4, 1] = torch.nan
    assert group_amax(x, ENDS).isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("keyed", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)], ids=str)
def test_a_group_in_nvfp4_is_what_it_would_be_alone(block: tuple[int, int], keyed: bool) -> None:
    """Groups of very different magnitudes, one empty; rows past the last are ignored and become zero."""
    ends = torch.tensor([16, 16, 64, 80], dtype=torch.int32)
    x = torch.randn(90, 40, generator=torch.Generator().manual_seed(0))
    x[:16] *= 1e-4
    x[64:80] *= 1e4
    x[80:] = torch.nan
    keys = token_keys(torch.tensor([1]), torch.arange(90), salt=0) if keyed else None
    found = quantize_nvfp4(x, block=block, ends_e=ends, keys=keys).dequantize()
    start = 0
    for end in ends.tolist():
        alone = quantize_nvfp4(x[start:end], block=block, keys=None if keys is None else keys[start:end])
        assert torch.equal(found[start:end], alone.dequantize())
        start = end
    assert not found[80:].any()


def test_groups_in_nvfp4_may_be_given_their_magnitudes() -> None:
    x, ends, amax = torch.randn(32, 16), torch.tensor([16, 32], dtype=torch.int32), torch.tensor([5.0, 50.0])
    found = quantize_nvfp4(x, ends_e=ends, global_amax=amax)
    assert torch.equal(found.dequantize()[16:], quantize_nvfp4(x[16:], global_amax=amax[1]).dequantize())
    assert torch.equal(found.mT.dequantize(), found.dequantize().mT)
    with pytest.raises(ValueError, match=r"one number for each group: \(2,\)"):
        quantize_nvfp4(x, ends_e=ends, global_amax=torch.zeros(3))
    with pytest.raises(ValueError, match="divides the rows of one matrix"):
        quantize_nvfp4(torch.zeros(2, 16, 16), ends_e=ends)
