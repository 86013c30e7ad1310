"""Scales in tiles: the reference against the formula of cuBLAS and torchao's order, the kernel against the reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from moefw_kernels.swizzle import reference, swizzle
from pairwise import each_value

SHAPES = [(1, 1), (128, 4), (130, 5), (257, 9), (31, 3), (0, 4), (4, 0), (3, 1, 7), (2, 129, 6), (0, 2, 2)]
GROUPS = [(128, 0, 5, 300, 1), (0, 0), (7,), (0, 131, 0), (4, 8, 3), ()]


def drawn(*shape: int) -> Tensor:
    return torch.randint(1, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def ends_of(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()


def test_a_tile_has_the_order_of_cublas() -> None:
    """Row r and column c of a tile are at byte ``r % 32 * 16 + r // 32 * 4 + c``; tiles are in row-major order."""
    scales = drawn(256, 8)
    tiles = swizzle(scales)
    for row, column in ((0, 0), (31, 3), (32, 0), (127, 3), (128, 0), (5, 4), (200, 6)):
        tile, r, c = row // 128 * 2 + column // 4, row % 128, column % 4
        assert tiles[tile * 512 + r % 32 * 16 + r // 32 * 4 + c] == scales[row, column]


@pytest.fixture(scope="module")
def to_blocked() -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        formats = pytest.importorskip("torchao.prototype.mx_formats.utils", reason="torchao is not installed")
    return formats.to_blocked  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_order_is_that_of_torchao(shape: tuple[int, ...], to_blocked: Callable[[Tensor], Tensor]) -> None:
    scales = drawn(*shape)
    found = swizzle(scales)
    matrices = scales.reshape(-1, *shape[-2:]) if scales.numel() else scales.new_empty(0, 1, 1)
    assert torch.equal(found.flatten(), torch.cat([scales.new_empty(0), *map(to_blocked, matrices)]))
    assert torch.equal(swizzle(scales.mT), swizzle(scales.mT.contiguous()))


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_each_group_has_tiles_of_its_own(
    sizes: Sequence[int], axis: int, to_blocked: Callable[[Tensor], Tensor]
) -> None:
    """Rows or columns past the last group are left out, and unused bytes are zero."""
    along, across = sum(sizes) + 3, 9 if axis == -2 else 131
    scales = drawn(along, across) if axis == -2 else drawn(across, along)
    found = swizzle(scales, ends=ends_of(sizes), axis=axis)
    groups = [part for part in scales.split([*sizes, 3], axis)[:-1] if part.numel()]
    wanted = torch.cat([scales.new_empty(0), *(to_blocked(part) for part in groups)])
    assert torch.equal(found.flatten()[: len(wanted)], wanted)
    assert not found.flatten()[len(wanted) :].any()
    room, tile = along // (128 if axis == -2 else 4) + len(sizes), (128, 4)
    assert found.shape == ((128 * room, 12) if axis == -2 else (256, tile[1] * room))
    assert found.is_contiguous()


def test_scales_keep_their_dtype() -> None:
    for dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        scales = drawn(5, 3).view(dtype)
        assert swizzle(scales).dtype is dtype
        assert torch.equal(swizzle(scales).view(torch.uint8), swizzle(scales.view(torch.uint8)))


def kernel_as_the_reference(scales: Tensor, ends: Tensor | None, axis: int) -> None:
    from moefw_kernels.swizzle import triton

    found = triton.swizzle(scales, ends, axis)
    wanted = reference.swizzle(scales, ends, axis)
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_of_matrices(interpreter: ProcessPoolExecutor, shape: tuple[int, ...]) -> None:
    for scales in (drawn(*shape), drawn(*shape).mT):
        interpreter.submit(kernel_as_the_reference, scales, None, -2).result()


@pytest.mark.parametrize(("sizes", "axis"), each_value(GROUPS, [-2, -1]), ids=str)
def test_the_kernel_of_groups(interpreter: ProcessPoolExecutor, sizes: Sequence[int], axis: int) -> None:
    for across in (5, 130):
        scales = drawn(sum(sizes) + 3, across)
        interpreter.submit(kernel_as_the_reference, scales if axis == -2 else scales.T, ends_of(sizes), axis).result()


def test_what_cannot_be_swizzled_is_named() -> None:
    with pytest.raises(ValueError, match=r"cannot swizzle torch.float32 \(2, 2\): give one byte each"):
        swizzle(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"give one byte each, \(..., R, C\)"):
        swizzle(drawn(3))
    for scales, ends, axis in (
        (drawn(1, 2, 2), ends_of((2,)), -2),
        (drawn(2, 2), ends_of((2,)).long(), -2),
        (drawn(2, 2), ends_of((2,)), 0),
    ):
        with pytest.raises(ValueError, match=r"give torch.int32 for the rows \(-2\) or columns \(-1\) of one matrix"):
            swizzle(scales, ends=ends, axis=axis)
