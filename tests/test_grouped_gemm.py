"""The grouped GEMM on FP8 blocks: the reference against formulas, the kernels against it in Triton's interpreter."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.grouped_gemm import blockwise_grouped_mm, reference
from moefw_kernels.quantize import Quantized, quantize_fp8

GROUPS = [(128, 0, 5, 300, 1), (7,), (0, 0), (0, 131, 0), (1, 1, 2, 3, 5, 7, 11, 13, 17)]
BLOCKS = [(128, 0, 256), (0, 0), (0, 384, 0), (128,)]


def drawn(*shape: int, seed: int) -> Tensor:
    """Values whose blocks have scales of their own, along both axes."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(-6, 7, (size,), generator=generator).float().exp2() for size in shape[-2:])
    return torch.randn(shape, generator=generator) * rows.unsqueeze(1) * columns


def ends_of(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def rows_by_weights(sizes: Sequence[int], *, backward: bool) -> tuple[Quantized, Quantized]:
    """Rows of 384 values, seven of them NaN past the last group, by weights that lie as in fprop or as in dgrad."""
    x = drawn(sum(sizes) + 7, 384, seed=1)
    x[sum(sizes) :] = torch.nan
    if backward:
        weights = quantize_fp8(drawn(len(sizes), 384, 256, seed=2), block=(128, 128)).along(-2)
    else:
        weights = quantize_fp8(drawn(len(sizes), 256, 384, seed=2), block=(128, 128)).mT
    return quantize_fp8(x, block=(1, 128), power_of_two=False), weights


def over_rows(sizes: Sequence[int]) -> tuple[Quantized, Quantized]:
    """A block of NaN past the last group."""
    grad, x = drawn(sum(sizes) + 128, 256, seed=3), drawn(sum(sizes) + 128, 384, seed=4)
    grad[sum(sizes) :], x[sum(sizes) :] = torch.nan, torch.nan
    return quantize_fp8(grad, block=(128, 1)).mT, quantize_fp8(x, block=(128, 1), power_of_two=False)


def close(mine: Tensor, right: Tensor) -> None:
    """To what fp32 sums in another order may differ by, of the largest value of a row and of a column."""
    assert mine.shape == right.shape
    assert mine.dtype == right.dtype
    assert mine.isfinite().all()
    if right.numel():
        down, across = (right.float().abs().amax(axis, keepdim=True).clamp(min=1e-30) for axis in (-2, -1))
        error = ((mine.float() - right.float()).abs() / torch.minimum(down, across)).max().item()
        assert error <= (2**-7 if right.dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["fprop", "dgrad"])
def test_the_reference_multiplies_each_groups_rows_by_its_weights(sizes: Sequence[int], backward: bool) -> None:
    x, weights = rows_by_weights(sizes, backward=backward)
    ends, count = ends_of(sizes), sum(sizes)
    found = blockwise_grouped_mm(x, weights, ends, out_dtype=torch.float32)
    wanted = torch.cat(
        [rows @ w for rows, w in zip(x.dequantize()[:count].double().split(list(sizes)), weights.dequantize().double())]
    )
    assert found.shape == (count + 7, 256)
    close(found[:count], wanted.float())


@pytest.mark.parametrize("sizes", BLOCKS, ids=str)
def test_the_reference_sums_over_each_groups_rows(sizes: Sequence[int]) -> None:
    grad, x = over_rows(sizes)
    found = blockwise_grouped_mm(grad, x, ends_of(sizes), out_dtype=torch.float32)
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
    mine, right = (each.blockwise_grouped_mm(*pair, ends, dtype) for each in (triton, reference))
    assert mine.shape == right.shape
    count = sum(sizes) if mine.ndim == 2 else len(mine)
    close(mine[:count], right[:count])


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["fprop", "dgrad"])
def test_the_kernel_of_rows_by_weights(interpreter: ProcessPoolExecutor, sizes: Sequence[int], backward: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pair = rows_by_weights(sizes, backward=backward)
        interpreter.submit(kernel_as_the_reference, sizes, pair, dtype).result()


@pytest.mark.parametrize("sizes", BLOCKS, ids=str)
def test_the_kernel_that_sums_over_rows(interpreter: ProcessPoolExecutor, sizes: Sequence[int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        interpreter.submit(kernel_as_the_reference, sizes, over_rows(sizes), dtype).result()


def each_tile_gives_the_same_product() -> None:
    from moefw_kernels.grouped_gemm import triton

    sizes = (128, 0, 256)
    ends = ends_of(sizes)
    for tuned, pair in (
        (triton._rows_by_weights, rows_by_weights(sizes, backward=False)),
        (triton._weight_gradient, over_rows(sizes)),
    ):
        found = []
        for m, n, *_ in triton._TILES:
            tuned.configs[0].kwargs.update(BM=m, BN=n)
            found.append(triton.blockwise_grouped_mm(*pair, ends, torch.float32)[: sum(sizes)])
        for other in found:
            close(other, found[0])


def test_each_tile_gives_the_same_product(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(each_tile_gives_the_same_product).result()


def refusals() -> Iterator[tuple[Quantized, Quantized, Tensor, str]]:
    sizes = (128, 128)
    (x, weights), ends = rows_by_weights(sizes, backward=False), ends_of(sizes)
    grad, rows = over_rows(sizes)
    yield x.mT, weights, ends, r"\(128, 1\) by e4m3 in blocks of \(128, 128\): give float8 in blocks of \(1, 128\) by"
    yield x, weights.mT, ends, r"cannot multiply \(263, 384\) by \(2, 256, 384\): give \(R, I\) by \(e, I, O\)"
    small = quantize_fp8(drawn(2, 384, 96, seed=5), block=(128, 128)).along(-2)
    yield x, small, ends, "with I and O multiples of 128"
    yield x, weights.along(-1), ends, "lay them along the axis that is summed over, as Quantized.along does"
    yield x, weights, ends.long(), r"ends are torch.int64 \(2,\): give one torch.int32"
    yield x, weights, ends[:1], r"ends are torch.int32 \(1,\): give one torch.int32 for each group, \(2,\)"
    yield grad, rows.mT, ends, r"give float8 in blocks of \(1, 128\) by \(128, 1\)"


@pytest.mark.parametrize("case", range(7))
def test_what_cannot_be_multiplied_is_named(case: int) -> None:
    a, b, ends, message = list(refusals())[case]
    with pytest.raises(ValueError, match=message):
        blockwise_grouped_mm(a, b, ends)


def compiled(name: str, types: str, aligned: str, tile: tuple[int, int, int, int]) -> tuple[str, str]:
    """Return the PTX for Hopper and what ptxas says of it; sizes divide by 16, as they do."""
    import triton
    from triton.backends.compiler import GPUTarget

    from moefw_kernels.grouped_gemm import triton as ours

    kernel, (m, n, warps, stages) = getattr(ours, name), tile
    constants: dict[str, Any] = {"BM": m, "BN": n, **({"G": 8} if "G" in kernel.arg_names else {})}
    names = [argument for argument in kernel.arg_names if argument not in constants]
    kinds = dict(zip(names, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    place = kernel.arg_names.index
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={argument: kinds[argument] for argument in kernel.arg_names},
        constexprs={(place(argument),): value for argument, value in constants.items()},
        attrs={(place(argument),): [["tt.divisibility", 16]] for argument in aligned.split()},
    )
    options = {"num_warps": warps, "num_stages": stages}
    code = str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [assembler, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "/dev/stdin"]
    return code, subprocess.run(command, input=code, capture_output=True, text=True, check=True).stderr


POINTERS = "a a_scales b b_scales ends out"


@pytest.mark.parametrize("tile", range(4))
@pytest.mark.parametrize(
    ("name", "types", "aligned"),
    [
        ("_rows_kernel", "*fp8e4nv *fp32 *fp8e4nv *fp32 *i32 *bf16" + " i32" * 8, f"{POINTERS} N K"),
        ("_weight_gradient_kernel", "*fp8e4nv *fp32 *fp8e4nv *fp32 *i32 *fp32" + " i32" * 7, f"{POINTERS} M N K"),
    ],
)
def test_a_kernel_compiles_to_the_tensor_cores_of_hopper(
    compiler: ProcessPoolExecutor, name: str, types: str, aligned: str, tile: int
) -> None:
    from moefw_kernels.grouped_gemm.triton import _TILES

    code, assembled = compiler.submit(compiled, name, types, aligned, _TILES[tile]).result()
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3", code)
    assert "cp.async.cg.shared.global" in code, "loads of codes are wide and run ahead"
    assert "0 bytes spill stores, 0 bytes spill loads" in assembled
