"""The Triton kernels equal the reference bit for bit, in the interpreter.

An access out of bounds ends an interpreting process, so kernels run in separate processes.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefw_kernels import quantize as package
from moefw_kernels.quantize import E4M3, E5M2, Quantized, reference
from moefw_kernels.random import token_keys, uniform
from pairwise import each_value

INF, NAN = float("inf"), float("nan")
Size = tuple[int, ...]


def awkward(size: Size, dtype: torch.dtype) -> Tensor:
    """Numbers with special rows and elements: zeros, infinities, NaN, huge and tiny numbers.

    No subnormal bf16 numbers, which the interpreter of Triton 3.7 reads wrongly.
    """
    generator = torch.Generator().manual_seed(sum(size))
    x = torch.randn(size, generator=generator) * torch.randn(*size[:-1], 1, generator=generator).mul(3).exp()
    rows, columns = size[-2:]
    largest = torch.finfo(dtype).max
    for row, change in enumerate((0.0, -0.0, 1e-36 if dtype is torch.bfloat16 else 1e-40, 1e-36)):
        if rows > 4 * row + 3:
            x[..., 4 * row, :] *= change
    if rows > 24 and columns > 20:
        x[..., 24, 3], x[..., 23, 20], x[..., 22, 18], x[..., 21, 0], x[..., 20, 2] = INF, -INF, NAN, largest, -NAN
    x = x.to(dtype)
    return x.masked_fill(x.abs() < 2**-126, 0) if dtype is torch.bfloat16 else x


def same(mine: Quantized, truth: Quantized) -> None:
    """Compare all bits but those of an fp32 scale that is NaN: a GPU's own NaN has others than ours."""
    for name in ("fmt", "block", "axis", "shape"):
        assert getattr(mine, name) == getattr(truth, name), name
    for name in ("codes", "scales", "global_scale"):
        left, right = getattr(mine, name), getattr(truth, name)
        if right is not None:
            assert left.dtype == right.dtype
            assert left.shape == right.shape
            word = torch.uint8 if left.element_size() == 1 else torch.int32
            if word is torch.int32:
                assert torch.equal(left.isnan(), right.isnan()), name
                left, right = left.nan_to_num(0.0, INF, -INF), right.nan_to_num(0.0, INF, -INF)
            assert torch.equal(left.view(word), right.view(word)), name
    assert mine.codes.stride(mine.axis) == 1 or not mine.codes.numel()


SIZES = [(1, 1), (3, 17), (131, 67), (2, 29, 130), (0, 5), (4, 0), (2, 1, 7, 40)]


def quantized_as_the_reference(name: str, sizes: list[Size], dtype: torch.dtype, options: tuple[Any, ...]) -> None:
    from moefw_kernels.quantize import triton

    for size in sizes:
        x = awkward(size, dtype)
        for view in (x, x[..., ::2, ::3].mT):
            same(getattr(triton, name)(view, *options), getattr(reference, name)(view, *options))


def both_as_the_reference(name: str, block: int, sizes: list[Size], options: tuple[Any, ...]) -> None:
    from moefw_kernels.quantize import triton

    for size in sizes:
        x = awkward(size, torch.bfloat16)
        for view in (x, x.mT):
            row, column = getattr(triton, f"{name}_both")(view, *options)
            same(row, getattr(reference, name)(view, (1, block), *options))
            same(column, getattr(reference, name)(view, (block, 1), *options))


def nvfp4_as_the_reference(block: tuple[int, int], dtype: torch.dtype, sizes: list[Size], keyed: bool) -> None:
    from moefw_kernels.quantize import triton

    for size in sizes:
        x = awkward(size, dtype)
        for view in (x, x[..., ::2, ::3].mT):
            seeds = torch.arange(view.shape[:-1].numel())
            keys = token_keys(seeds, torch.arange(1), salt=3).view(view.shape[:-1]) if keyed else None
            finite = view.float().nan_to_num(0, 0, 0)
            largest = finite.abs().amax() if view.numel() else torch.zeros(())
            odd = [torch.tensor(number) for number in (3.7, 0.0, INF, NAN)] if size == sizes[0] else []
            each = [finite.abs().amax((-2, -1))] if view.ndim > 2 else []
            for level in (largest, *odd, *each):
                for scales in ("nearest", "up"):
                    mine = triton.quantize_nvfp4(view, block, level, keys, scales)
                    same(mine, reference.quantize_nvfp4(view, block, level, keys, scales))


@pytest.mark.parametrize(
    ("block", "power_of_two"), each_value([(1, 128), (128, 1), (128, 128)], [True, False]), ids=str
)
def test_fp8_blocks(interpreter: ProcessPoolExecutor, block: Size, power_of_two: bool) -> None:
    dtype = torch.float32 if power_of_two else torch.float16
    interpreter.submit(quantized_as_the_reference, "quantize_fp8", SIZES, dtype, (block, power_of_two)).result()


@pytest.mark.parametrize("block", [(1, 32), (32, 1), (32, 32)], ids=str)
def test_mxfp8_blocks(interpreter: ProcessPoolExecutor, block: Size) -> None:
    interpreter.submit(quantized_as_the_reference, "quantize_mxfp8", SIZES, torch.float32, (block,)).result()


@pytest.mark.parametrize(
    ("name", "block", "options"),
    [("quantize_fp8", 128, (True,)), ("quantize_fp8", 128, (False,)), ("quantize_mxfp8", 32, ())],
)
def test_both_orientations_in_one_read(
    interpreter: ProcessPoolExecutor, name: str, block: int, options: tuple[Any, ...]
) -> None:
    interpreter.submit(both_as_the_reference, name, block, SIZES, options).result()


@pytest.mark.parametrize(("block", "keyed"), each_value([(1, 16), (16, 1), (16, 16)], [False, True]), ids=str)
def test_nvfp4_blocks(interpreter: ProcessPoolExecutor, block: Size, keyed: bool) -> None:
    sizes = [(29, 67), (1, 1), (3, 17), (2, 17, 19), (0, 5), (4, 0)]
    interpreter.submit(nvfp4_as_the_reference, block, torch.bfloat16, sizes, keyed).result()


def both_as_of_tensors(*options: Any) -> None:
    from moefw_kernels.quantize import triton

    same(triton.quantize_tensor(*options), reference.quantize_tensor(*options))
    for mine, truth in zip(
        triton.quantize_tensor_both(*options), reference.quantize_tensor_both(*options), strict=True
    ):
        same(mine, truth)


def groups_as_the_reference(dtype: torch.dtype) -> None:
    """Groups with an infinity, with NaN, without rows, of zeros alone, and rows past the last."""
    from moefw_kernels.quantize import triton

    x = awkward((102, 40), dtype)
    x[48:64] = 0
    x[96:] = NAN
    keys = token_keys(torch.tensor([1]), torch.arange(len(x)), salt=0)
    ends = torch.tensor([16, 16, 32, 48, 64, 96], dtype=torch.int32)
    for view, ends_e in ((x, ends), (x.mT.contiguous().mT, ends), (x[:3], ends[:1] - 16), (x[:16], ends[:0])):
        amax = triton.group_amax(view, ends_e, False)
        torch.testing.assert_close(amax, reference.group_amax(view, ends_e, False), rtol=0, atol=0, equal_nan=True)
        for block, given in (((1, 16), None), ((1, 16), keys), ((16, 1), keys), ((16, 16), None)):
            options = view, block, amax, None if given is None else given[: len(view)], "up", ends_e
            same(triton.quantize_nvfp4(*options), reference.quantize_nvfp4(*options))
        for fmt, scaled, level in ((E4M3, False, amax), (E5M2, True, amax + 1)):
            both_as_of_tensors(view, fmt, level, ends_e, scaled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_of_rows_have_scales_of_their_own(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    interpreter.submit(groups_as_the_reference, dtype).result()


def tensors_as_the_reference(dtype: torch.dtype) -> None:
    from moefw_kernels.quantize import triton

    for size in ((1, 1), (29, 67), (2, 17, 19), (0, 5), (4, 0)):
        x = awkward(size, dtype)
        for view in (x, x[..., ::2, ::3].mT):
            amax = triton.matrix_amax(view, False)
            torch.testing.assert_close(amax, reference.matrix_amax(view, False), rtol=0, atol=0, equal_nan=True)
            both_as_of_tensors(view, E4M3, amax, None, False)
            both_as_of_tensors(view, E5M2, amax, None, False)
            both_as_of_tensors(view, E5M2, torch.tensor(0.37), None, True)
    for level in (0.0, INF, NAN, 1e-44, 1e38):
        both_as_of_tensors(awkward((3, 17), dtype), E4M3, torch.tensor(level), None, False)
        both_as_of_tensors(awkward((3, 17), dtype), E4M3, torch.tensor(level), None, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_one_scale_for_a_matrix(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    interpreter.submit(tensors_as_the_reference, dtype).result()


def square_nvfp4_as_the_reference() -> None:
    from moefw_kernels.quantize import triton

    for size in ((29, 67), (1, 1), (2, 17, 19), (0, 5)):
        x = awkward(size, torch.bfloat16)
        for view in (x, x.mT):
            level = triton.matrix_amax(view, False)
            for mine, truth in zip(
                triton.quantize_nvfp4_both(view, level), reference.quantize_nvfp4_both(view, level), strict=True
            ):
                same(mine, truth)


def square_fp8_as_the_reference() -> None:
    from moefw_kernels.quantize import triton

    for size in ((130, 67), (2, 17, 129), (0, 5)):
        x = awkward(size, torch.bfloat16)
        for view in (x, x.mT):
            for mine, truth in zip(
                triton.quantize_fp8_both(view, True, True), reference.quantize_fp8_both(view, True, True), strict=True
            ):
                same(mine, truth)


def test_both_orientations_of_squares_in_fp8(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(square_fp8_as_the_reference).result()


def test_both_orientations_of_squares(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(square_nvfp4_as_the_reference).result()


def transformed_and_quantized_as_the_reference(dtype: torch.dtype) -> None:
    from moefw_kernels.quantize import triton

    ends = torch.tensor([16, 16, 48], dtype=torch.int32)
    x = awkward((64, 20), dtype)
    keys = token_keys(torch.tensor([1]), torch.arange(len(x)), salt=0)
    for view, ends_e in ((x, None), (x, ends), (x.mT.contiguous().mT, ends), (torch.stack([x, -x]), None)):
        if ends_e is None:
            amax, truth = triton.matrix_amax(view, True), reference.matrix_amax(view, True)
        else:
            amax, truth = triton.group_amax(view, ends_e, True), reference.group_amax(view, ends_e, True)
        torch.testing.assert_close(amax, truth, rtol=0, atol=0, equal_nan=True)
        given = keys.expand(view.shape[:-1])
        for draws, scales in ((None, "nearest"), (given, "up")):
            options = view, (16, 1), amax, draws, scales, ends_e, True
            same(triton.quantize_nvfp4(*options), reference.quantize_nvfp4(*options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_transform_before_nvfp4(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    interpreter.submit(transformed_and_quantized_as_the_reference, dtype).result()


def a_draw_that_equals_the_fraction_stays_below() -> None:
    from moefw_kernels.quantize import triton

    keys = token_keys(torch.tensor([5]), torch.arange(20), salt=1)
    x = uniform(keys, 64) / 2  # each number, in units of E2M1's least step 0.5, is its own draw
    x[:, ::16] = 6.0
    found = triton.quantize_nvfp4(x, (1, 16), torch.tensor(2688.0), keys)
    assert torch.equal(found.dequantize(), x.where(x == 6.0, 0.0))


def test_a_draw_that_equals_the_fraction_stays_below(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(a_draw_that_equals_the_fraction_stays_below).result()


def casts_as_the_reference() -> None:
    """All bf16 numbers and their fp32 neighbours, in blocks with scale one: tests the cast itself on every grid point."""
    from moefw_kernels.quantize import triton

    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat([x, *(torch.nextafter(x, torch.full_like(x, bound)) for bound in (INF, -INF))])
    x = x[x.abs() <= E4M3.max]
    x = torch.nn.functional.pad(x, (0, -len(x) % 127)).view(-1, 127)
    x = torch.cat([x, torch.full((len(x), 1), E4M3.max)], 1)
    assert (reference.quantize_fp8(x, (1, 128), True).scales == 1).all()
    same(triton.quantize_fp8(x, (1, 128), True), reference.quantize_fp8(x, (1, 128), True))


def test_the_cast_of_every_bf16_number_and_its_neighbours(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(casts_as_the_reference).result()


def transformed_as_the_reference(dtype: torch.dtype) -> None:
    from moefw_kernels.hadamard import reference as truth
    from moefw_kernels.hadamard import triton

    for size in ((1, 16), (3, 48), (2, 37, 96), (0, 16), (4, 0), (2, 3, 5, 32)):
        x = awkward(size, dtype)
        for view in (x, torch.cat([x, x], -2)[..., ::2, :], x.mT.contiguous().mT):
            mine, right = triton.hadamard(view), truth.hadamard(view)
            assert mine.dtype == dtype
            assert mine.shape == right.shape
            torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_hadamard_transform(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    interpreter.submit(transformed_as_the_reference, dtype).result()


def tensors_on_a_gpu_go_to_the_kernels() -> None:
    from moefw_kernels.quantize import triton

    assert package._encoders(SimpleNamespace(is_cuda=True)) is triton  # type: ignore[arg-type]
    assert package._encoders(SimpleNamespace(is_cuda=False)) is reference  # type: ignore[arg-type]


def test_tensors_on_a_gpu_go_to_the_kernels(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(tensors_on_a_gpu_go_to_the_kernels).result()
