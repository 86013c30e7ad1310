"""The transform spreads outliers, cancels in a product, and adds in the same order on every device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefw_kernels.hadamard import hadamard

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]  # of Transformer Engine
PARITY = torch.tensor([[(i & j).bit_count() % 2 for j in range(16)] for i in range(16)])
MATRIX = torch.tensor(SIGNS).unsqueeze(1) * (1 - 2 * PARITY) / 4
"""Sylvester's: the sign of entry (i, j) is the parity of the bits that i and j share."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def exact(x: Tensor) -> Tensor:
    return (x.double().unflatten(-1, (-1, 16)) @ MATRIX.double()).flatten(-2)


def test_the_matrix_is_that_of_transformer_engine_and_orthogonal() -> None:
    assert torch.equal(hadamard(torch.eye(16)), MATRIX)
    assert torch.equal(hadamard(torch.eye(16), axis=-2), MATRIX.T)
    assert torch.equal(MATRIX @ MATRIX.T, torch.eye(16))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02), (torch.float16, 2e-3)])
def test_every_sixteen_numbers_are_multiplied_with_the_matrix(dtype: torch.dtype, tolerance: float) -> None:
    x = random(2, 48, 64, dtype=dtype)
    for axis, expected in ((-1, exact(x)), (-2, exact(x.mT).mT)):
        found = hadamard(x, axis=axis)
        assert found.dtype == dtype
        assert found.stride(axis) == 1
        torch.testing.assert_close(found.double(), expected, rtol=tolerance / 4, atol=tolerance)


def test_half_precision_is_rounded_once() -> None:
    x = random(32, 32, dtype=torch.bfloat16)
    assert torch.equal(hadamard(x), hadamard(x.float()).bfloat16())


def test_a_product_does_not_notice() -> None:
    a, b = random(3, 20, 96), random(3, 96, 24)
    turned = hadamard(a) @ hadamard(b, axis=-2)
    torch.testing.assert_close(turned, a @ b, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(hadamard(a) @ b, a @ b, rtol=0.1, atol=0.1)


def test_an_outlier_is_spread_over_its_sixteen() -> None:
    x = torch.zeros(1, 32)
    x[0, 5] = 64.0
    assert torch.equal(hadamard(x).abs(), torch.tensor([[16.0] * 16 + [0.0] * 16]))


@settings(max_examples=40)
@given(st.sampled_from([0, 1, 7, 31]), st.integers(0, 3), st.sampled_from([(), (0,), (2, 3)]), st.booleans())
def test_shapes_and_strides_change_nothing(rows: int, groups: int, batch: tuple[int, ...], transposed: bool) -> None:
    wide = random(*batch, 2 * rows, 48 * groups)[..., ::2, :]
    x = wide[..., ::3].clone().mT.contiguous().mT if transposed else wide[..., ::3]
    found = hadamard(x)
    assert found.shape == x.shape
    assert torch.equal(found, hadamard(x.contiguous()))
    assert torch.equal(hadamard(x.mT, axis=-2), found.mT)


def test_what_does_not_fit_is_refused() -> None:
    for x, axis in (
        (torch.zeros(16, 24), -1),
        (torch.zeros(24, 16), -2),
        (torch.zeros(16), -1),
        (torch.zeros(16, 16), 0),
    ):
        with pytest.raises(ValueError, match="pad with zeros"):
            hadamard(x, axis=axis)
    with pytest.raises(ValueError, match=r"torch\.int32"):
        hadamard(torch.zeros(16, 16, dtype=torch.int32))
