"""Rows as eight-bit integers: each block is scaled by its largest value and rounded to the nearest of evenly spaced values."""

from __future__ import annotations

import pytest
import torch

from moefw_kernels.quantize import from_integers, integer_rows


def test_a_value_comes_back_within_half_a_step_of_its_block() -> None:
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7).unsqueeze(1)
    codes, scales = integer_rows(x)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.int8, x.shape, (7, 3))
    assert torch.equal(scales[:, 2], x[:, 256:].abs().amax(1) / 127)
    steps = scales.repeat_interleave(128, 1)[:, :300]
    assert ((from_integers(codes, scales, torch.float32) - x).abs() <= steps * 0.5001).all()


def test_the_largest_value_of_a_block_is_exact_and_zeros_stay() -> None:
    x = torch.zeros(2, 256)
    x[0, 130], x[0, 131] = -3.0, 1.5
    codes, scales = integer_rows(x)
    assert codes[0, 130] == -127
    assert from_integers(codes, scales, torch.float32)[0, 130] == pytest.approx(-3.0, rel=1e-6)
    assert (scales[1] == 0).all()
    assert (from_integers(codes, scales, torch.bfloat16)[1] == 0).all()


def test_the_error_is_a_quarter_of_e4m3s() -> None:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    error = (from_integers(*integer_rows(x), torch.float32) - x).norm() / x.norm()
    assert 0.005 < error < 0.0065


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_does_not_come_back_as_one(value: float) -> None:
    x = torch.ones(1, 256)
    x[0, 3] = value
    back = from_integers(*integer_rows(x), torch.float32)
    assert back[0, :128].isnan().all()
    assert (back[0, 128:] == 1).all()


@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (3, 1)])
def test_rows_may_be_few_and_short(shape: tuple[int, int]) -> None:
    assert from_integers(*integer_rows(torch.ones(shape)), torch.bfloat16).tolist() == torch.ones(shape).tolist()
