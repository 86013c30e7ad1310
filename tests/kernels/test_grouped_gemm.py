"""The grouped GEMMs on FP8: the reference against formulas, the kernels against it in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.grouped_gemm import blockwise_grouped_mm, reference, tensorwise_grouped_mm
from moefw_kernels.quantize import E5M2, Quantized, quantize_fp8, quantize_tensor
from pairwise import each_value

GROUPS = [(128, 0, 5, 300, 1), (7,), (0, 0), (0, 131, 0), (1, 1, 2, 3, 5, 7, 11, 13, 17)]
BLOCKS = [(128, 0, 256), (0, 0), (0, 384, 0), (128,)]
SIXTEENS = [(16, 0, 144, 256), (0, 0), (0, 112, 0), (128,)]


def drawn(*shape: int, seed: int) -> Tensor:
    """Values with a different scale for each block, along both axes."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(-6, 7, (size,), generator=generator).float().exp2() for size in shape[-2:])
    return torch.randn(shape, generator=generator) * rows.unsqueeze(1) * columns


def ends_of(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def rows_by_weights(sizes: Sequence[int], *, backward: bool) -> tuple[Quantized, Quantized]:
    """Rows of 384 values, with seven rows of NaN past the last group, and weights in the layout of fprop or dgrad."""
    x = drawn(sum(sizes) + 7, 384, seed=1)
    x[sum(sizes) :] = torch.nan
    if backward:
        weights = quantize_fp8(drawn(len(sizes), 384, 256, seed=2), block=(128, 128)).along(-2)
    else:
        weights = quantize_fp8(drawn(len(sizes), 256, 384, seed=2), block=(128, 128)).mT
    return quantize_fp8(x, block=(1, 128), power_of_two=False), weights


def over_rows(sizes: Sequence[int]) -> tuple[Quantized, Quantized]:
    """Operands of a sum over rows, with a block of NaN past the last group."""
    grad, x = drawn(sum(sizes) + 128, 256, seed=3), drawn(sum(sizes) + 128, 384, seed=4)
    grad[sum(sizes) :], x[sum(sizes) :] = torch.nan, torch.nan
    return quantize_fp8(grad, block=(128, 1)).mT, quantize_fp8(x, block=(128, 1), power_of_two=False)


def gradients(x: Tensor, ends: Tensor) -> Quantized:
    """E5M2 without subnormal numbers, which Triton's interpreter multiplies wrongly."""
    found = quantize_tensor(x, fmt=E5M2, ends_e=ends)
    codes = found.codes.view(torch.uint8)
    return replace(found, codes=codes.masked_fill(codes & 0x7C == 0, 0).view(torch.float8_e5m2))


def tensorwise_rows_by_weights(sizes: Sequence[int], *, backward: bool) -> tuple[Quantized, Quantized]:
    """As above, with a scale for each group, gradients in E5M2."""
    x = drawn(sum(sizes) + 7, 384, seed=1)
    x[sum(sizes) :] = torch.nan
    ends = ends_of(sizes)
    if backward:
        return gradients(x, ends), quantize_tensor(drawn(len(sizes), 384, 256, seed=2)).along(-2)
    return quantize_tensor(x, ends_e=ends), quantize_tensor(drawn(len(sizes), 256, 384, seed=2)).mT


def tensorwise_over_rows(sizes: Sequence[int]) -> tuple[Quantized, Quantized]:
    grad, x = drawn(sum(sizes) + 16, 256, seed=3), drawn(sum(sizes) + 16, 384, seed=4)
    grad[sum(sizes) :], x[sum(sizes) :] = torch.nan, torch.nan
    ends = ends_of(sizes)
    return gradients(grad, ends).along(-2).mT, quantize_tensor(x, ends_e=ends).along(-2)


SUMS_OF_128: Final = 2.0**-7
"""Error of Hopper's FP8 tensor cores: some of 2**-13, as sums have 14 bits (arXiv 2412.19437, section 3.3.2), over the
largest value of a column, which in a group of few rows is small against what is summed."""
ALLOWED: Final = SUMS_OF_128 if os.environ.get("MOEFW_KERNELS_ON") == "cuda" else 1e-5


def close(mine: Tensor, right: Tensor, allowed: float = 1e-5) -> None:
    """Compare up to the error of fp32 sums in another order, relative to the largest value of a row and of a column."""
    assert mine.shape == right.shape
    assert mine.dtype == right.dtype
    assert mine.isfinite().all()
    if right.numel():
        down, across = (right.float().abs().amax(axis, keepdim=True).clamp(min=1e-30) for axis in (-2, -1))
        error = ((mine.float() - right.float()).abs() / torch.minimum(down, across)).max().item()
        allowed = max(allowed, 2**-7) if right.dtype is torch.bfloat16 else allowed
        assert error <= allowed, f"off by {error:.1e}, allowed {allowed:.1e}"


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["fprop", "dgrad"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blockwise", "tensorwise"])
def test_the_reference_multiplies_each_groups_rows_by_its_weights(
    sizes: Sequence[int], backward: bool, blocks: bool
) -> None:
    x, weights = (rows_by_weights if blocks else tensorwise_rows_by_weights)(sizes, backward=backward)
    ends, count = ends_of(sizes), sum(sizes)
    multiply = blockwise_grouped_mm if blocks else tensorwise_grouped_mm
    found = multiply(x, weights, ends, out_dtype=torch.float32)
    wanted = torch.cat(
        [rows @ w for rows, w in zip(x.dequantize()[:count].double().split(list(sizes)), weights.dequantize().double())]
    )
    assert found.shape == (count + 7, 256)
    close(found[:count], wanted.float())


OVER_ROWS = [*((sizes, True) for sizes in BLOCKS), *((sizes, False) for sizes in SIXTEENS)]


@pytest.mark.parametrize(("sizes", "blocks"), OVER_ROWS, ids=str)
def test_the_reference_sums_over_each_groups_rows(sizes: Sequence[int], blocks: bool) -> None:
    grad, x = (over_rows if blocks else tensorwise_over_rows)(sizes)
    multiply = blockwise_grouped_mm if blocks else tensorwise_grouped_mm
    found = multiply(grad, x, ends_of(sizes), out_dtype=torch.float32)
    count = sum(sizes)
    parts = (both.dequantize().double()[..., :count] for both in (grad, x.mT))
    lefts, rights = (part.split(list(sizes), -1) for part in parts)
    close(found, torch.stack([left @ right.T for left, right in zip(lefts, rights)]).float())


def test_it_is_what_torch_multiplies_in_groups() -> None:
    sizes = (128, 0, 256)
    (x, weights), ends = rows_by_weights(sizes, backward=False), ends_of(sizes)
    found = blockwise_grouped_mm(x, weights, ends, out_dtype=torch.float32)[: sum(sizes)]
    close(found, F.grouped_mm(x.dequantize(), weights.dequantize(), offs=ends)[: sum(sizes)])


def kernel_as_the_reference(sizes: Sequence[int], pair: tuple[Quantized, Quantized], dtype: torch.dtype) -> None:
    from moefw_kernels.grouped_gemm import triton

    ends = ends_of(sizes)
    kernel = triton.blockwise_grouped_mm if pair[0].block else triton.tensorwise_grouped_mm
    mine, right = (each(*pair, ends, dtype) for each in (kernel, reference.grouped_mm))
    assert mine.shape == right.shape
    count = sum(sizes) if mine.ndim == 2 else len(mine)
    close(mine[:count], right[:count], ALLOWED)


@pytest.mark.parametrize(("sizes", "backward", "blocks"), each_value(GROUPS, [False, True], [True, False]), ids=str)
def test_the_kernel_of_rows_by_weights(
    interpreter: ProcessPoolExecutor, sizes: Sequence[int], backward: bool, blocks: bool
) -> None:
    pair = (rows_by_weights if blocks else tensorwise_rows_by_weights)(sizes, backward=backward)
    for dtype in (torch.float32, torch.bfloat16):
        interpreter.submit(kernel_as_the_reference, sizes, pair, dtype).result()


@pytest.mark.parametrize(("sizes", "blocks"), OVER_ROWS, ids=str)
def test_the_kernel_that_sums_over_rows(interpreter: ProcessPoolExecutor, sizes: Sequence[int], blocks: bool) -> None:
    pair = (over_rows if blocks else tensorwise_over_rows)(sizes)
    for dtype in (torch.float32, torch.bfloat16):
        interpreter.submit(kernel_as_the_reference, sizes, pair, dtype).result()


def each_tile_gives_the_product() -> None:
    """Tune each kernel over one tile at a time: among several, the tuner would keep the one that it has cached."""
    import triton

    from moefw_kernels.grouped_gemm import triton as ours

    sizes = (128, 0, 256)
    ends = ends_of(sizes)
    pairs = {"_rows_by_weights": rows_by_weights(sizes, backward=False), "_weight_gradient": over_rows(sizes)}
    for name, pair in pairs.items():
        tuned, right = getattr(ours, name), reference.grouped_mm(*pair, ends, torch.float32)
        for m, n, warps, stages in ours._TILES:
            tile = triton.Config({"BM": m, "BN": n}, num_warps=warps, num_stages=stages)
            setattr(ours, name, triton.autotune([tile], key=tuned.keys)(tuned.fn))
            found = ours.blockwise_grouped_mm(*pair, ends, torch.float32)
            close(found[: sum(sizes)], right[: sum(sizes)], ALLOWED)
        setattr(ours, name, tuned)


def test_each_tile_gives_the_product(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(each_tile_gives_the_product).result()


def refusals() -> Iterator[tuple[Quantized, Quantized, Tensor, str]]:
    sizes = (128, 128)
    (x, weights), ends = rows_by_weights(sizes, backward=False), ends_of(sizes)
    grad, rows = over_rows(sizes)
    yield x.mT, weights, ends, r"\(128, 1\) by e4m3 in blocks of \(128, 128\): give e4m3 in blocks of \(1, 128\) by"
    yield x, weights.mT, ends, r"cannot multiply \(263, 384\) by \(2, 256, 384\): give \(R, I\) by \(e, I, O\)"
    small = quantize_fp8(drawn(2, 384, 96, seed=5), block=(128, 128)).along(-2)
    yield x, small, ends, "with I and O multiples of 128"
    yield x, weights.along(-1), ends, "lay them along the axis that is summed over, as Quantized.along does"
    yield x, weights, ends.long(), r"ends are torch.int64 \(2,\): give one torch.int32"
    yield x, weights, ends[:1], r"ends are torch.int32 \(1,\): give one torch.int32 for each group, \(2,\)"
    yield grad, rows.mT, ends, r"give e4m3 in blocks of \(1, 128\) by \(128, 1\)"


@pytest.mark.parametrize("case", range(7))
def test_what_cannot_be_multiplied_is_named(case: int) -> None:
    a, b, ends, message = list(refusals())[case]
    with pytest.raises(ValueError, match=message):
        blockwise_grouped_mm(a, b, ends)


def tensorwise_refusals() -> Iterator[tuple[Quantized, Quantized, Tensor, str]]:
    sizes = (128, 128)
    (x, weights), ends = tensorwise_rows_by_weights(sizes, backward=False), ends_of(sizes)
    grad, rows = tensorwise_over_rows(sizes)
    yield *rows_by_weights(sizes, backward=False), ends, r"give float8 with scales \(263, 1\) by \(2, 1, 1\), without"
    yield quantize_tensor(torch.ones(263, 384)), weights, ends, r"e4m3 with scales \(\) by e4m3 with scales \(2, 1, 1\)"
    yield grad, rows.mT, ends, r"give float8 with scales \(1, 272\) by \(384, 1\)"
    yield x, weights.along(-1), ends, "lay them along the axis that is summed over"
    yield grad, rows, ends.long(), "ends are torch.int64"


@pytest.mark.parametrize("case", range(5))
def test_what_has_no_scale_for_each_group_is_named(case: int) -> None:
    a, b, ends, message = list(tensorwise_refusals())[case]
    with pytest.raises(ValueError, match=message):
        tensorwise_grouped_mm(a, b, ends)
