"""Rotary positions: the operator against the formula in fp64, its gradient, and the kernel in Triton's interpreter."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from moefw_kernels.rope import reference, rotate
from pairwise import pairwise

SHAPES = [(1, 5, 3, 8), (2, 7, 2, 6), (2, 3, 1, 2), (0, 4, 2, 8)]
DTYPES = [torch.float32, torch.bfloat16]
KEPT = [0, 4, 5]
"""Values of a head that do not turn."""


def drawn(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, each: bool, kept: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads that are a part of wider ones, and the tables of positions, of all sequences or of ``each``.

    ``shape``: of the values that turn; ``kept``: others behind them.
    """
    batch, length, heads, width = shape
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(batch, length, heads + 1, width + kept + 3, generator=generator).to(dtype)
    angles = torch.randn(batch if each else 1, length, width // 2, generator=generator) * 3
    return wide[:, :, 1:, : width + kept], angles.cos() * 1.1, angles.sin() * 1.1


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, neighbours: bool) -> Tensor:
    """Multiply each pair, as a complex number, by that of its angle, in fp64; keep the values behind them."""
    half = cos.shape[-1]
    x = x.double()
    x, kept = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    product = torch.complex(first, second) * torch.complex(cos.double(), sin.double()).unsqueeze(2)
    return torch.cat([product.real, product.imag, kept], -1)


@pytest.mark.parametrize(
    ("shape", "dtype", "neighbours", "each", "kept"),
    pairwise(SHAPES, DTYPES, [False, True], [False, True], KEPT),
    ids=str,
)
def test_pairs_turn_and_gradients_turn_back(
    shape: tuple[int, int, int, int], dtype: torch.dtype, neighbours: bool, each: bool, kept: int
) -> None:
    x, cos, sin = drawn(shape, dtype, each=each, kept=kept)
    mine, right = x.clone().requires_grad_(), x.double().requires_grad_()
    out, wanted = rotate(mine, cos, sin, neighbours=neighbours), turned(right, cos, sin, neighbours=neighbours)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (out * weights).sum().backward()
    (wanted * weights).sum().backward()
    allowed = {"atol": 1e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.02, "rtol": 2**-8}
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, **allowed)
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad.double(), right.grad, **allowed)


def test_bf16_is_rounded_once() -> None:
    x, cos, sin = drawn((2, 9, 4, 16), torch.bfloat16, each=True)
    wanted = turned(x, cos, sin, neighbours=False).to(torch.bfloat16)
    assert (rotate(x, cos, sin, neighbours=False) == wanted).float().mean() > 0.99


def compare(
    shape: tuple[int, int, int, int], dtype: torch.dtype, neighbours: bool, back: bool, each: bool, kept: int
) -> None:
    from moefw_kernels.rope import triton

    given = (*drawn(shape, dtype, each=each, kept=kept), neighbours, back)
    allowed = {"atol": 1e-6, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 1e-6, "rtol": 2**-7}
    torch.testing.assert_close(triton.rotate(*given), reference.rotate(*given), **allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_reference(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    for neighbours in (False, True):
        for back in (False, True):
            for number, shape in enumerate([*SHAPES, (1, 40, 9, 128)]):
                given = (shape, dtype, neighbours, back, bool(number % 2), KEPT[number % 3])
                interpreter.submit(compare, *given).result()
