"""Every number of a format, every midpoint between two of them, and every critical block."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefw_kernels.quantize import (
    E2M1,
    E4M3,
    E5M2,
    Format,
    Quantized,
    decode,
    decode_e8m0,
    delayed_scale,
    encode,
    matrix_amax,
    mx_scale,
    pack,
    quantize_fp8,
    quantize_fp8_both,
    quantize_mxfp8,
    quantize_mxfp8_both,
    quantize_nvfp4,
    quantize_nvfp4_both,
    quantize_tensor,
    tensor_scale,
    unpack,
)
from moefw_kernels.random import token_keys, uniform

INF, NAN, FP32_MAX = float("inf"), float("nan"), torch.finfo(torch.float32).max
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)


def numbers(fmt: Format) -> Tensor:
    """The finite, non-negative numbers of a format in the order of their codes, from an independent source."""
    if fmt is E2M1:
        return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    return values[values.isfinite()]


def after(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, INF))


def before(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, -INF))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int32)


def same(left: Quantized, right: Quantized) -> None:
    for name in ("fmt", "block", "axis", "shape"):
        assert getattr(left, name) == getattr(right, name), name
    for name in ("codes", "scales", "global_scale"):
        mine, other = getattr(left, name), getattr(right, name)
        if mine is not None:
            assert mine.dtype == other.dtype, name
            assert torch.equal(bits(mine), bits(other)), name


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(*shape[:-1], 1, generator=generator) * 3
    return (torch.randn(shape, generator=generator) * spread.exp()).to(dtype)


@FORMATS
def test_every_number_keeps_its_code_and_every_midpoint_goes_to_the_even_one(fmt: Format) -> None:
    values = numbers(fmt)
    codes = torch.arange(len(values))
    middles = (values[1:] + values[:-1]) / 2
    even = codes[:-1] + codes[:-1] % 2
    for sign, offset in ((1, 0), (-1, 1 << fmt.sign_bit)):
        for x, expected in (
            (values, codes),
            (middles, even),
            (before(middles), codes[:-1]),
            (after(middles), codes[1:]),
            (after(values)[:-1], codes[:-1]),
            (before(values)[1:], codes[1:]),
        ):
            assert torch.equal(encode(sign * x, fmt).long(), expected + offset)
        assert torch.equal(decode((codes + offset).to(torch.uint8), fmt), sign * values)


@FORMATS
def test_what_is_beyond_the_largest_number_saturates_and_nan_stays_apart(fmt: Format) -> None:
    top = encode(torch.tensor([fmt.max]), fmt).item()
    sign = 1 << fmt.sign_bit
    assert fmt.max == numbers(fmt)[-1]
    beyond = torch.tensor([np.nextafter(np.float32(fmt.max), np.float32(INF)), fmt.max * 1.2, FP32_MAX, INF])
    assert encode(beyond, fmt).tolist() == [top] * 4
    assert encode(-beyond, fmt).tolist() == [top + sign] * 4
    assert encode(torch.tensor([NAN, -NAN]), fmt).tolist() == [fmt.nan_code] * 2
    assert decode(torch.tensor([fmt.nan_code], dtype=torch.uint8), fmt).isnan().item() is (fmt is not E2M1)
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38])
    assert encode(tiny, fmt).tolist() == [0, sign, 0, sign, 0]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_eight_bit_casts_are_those_of_torch(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (400_000,), generator=generator).int().view(torch.float32)
    x = x[x.isfinite()]
    assert torch.equal(encode(x, fmt), x.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8))


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_the_cast(fmt: Format, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert torch.equal(encode(x, fmt), encode(x.float(), fmt))


@pytest.mark.parametrize("axis", [-1, -2])
def test_two_codes_lie_in_a_byte_the_even_one_low(axis: int) -> None:
    codes = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)
    assert pack(codes).tolist() == [[0x21, 0x03], [0x54, 0x06]]
    assert pack(codes, axis=-2).tolist() == [[0x41, 0x52, 0x63]]
    packed = pack(codes, axis=axis)
    assert torch.equal(unpack(packed, count=codes.shape[axis], axis=axis), codes)
    assert packed.stride(axis) == 1


@FORMATS
def test_stochastic_rounding_takes_the_two_neighbours_and_no_other(fmt: Format) -> None:
    values = numbers(fmt)
    inner = values[:-1] + (values[1:] - values[:-1]) * 0.25
    codes = torch.arange(len(inner))
    for x, sign in ((inner, 0), (-inner, 1 << fmt.sign_bit)):
        for draw, step in ((0.0, 1), (0.2499, 1), (0.25, 0), (1 - 2**-24, 0)):
            found = encode(x, fmt, draws=torch.full_like(x, draw)).long()
            assert torch.equal(found, codes + step + sign)
    for draw in (0.0, 0.5, 1 - 2**-24):
        assert torch.equal(encode(values, fmt, draws=torch.full_like(values, draw)).long(), torch.arange(len(values)))
        beyond = torch.tensor([fmt.max * 1.01, INF])
        assert decode(encode(beyond, fmt, draws=torch.full_like(beyond, draw)), fmt).tolist() == [fmt.max] * 2


@FORMATS
def test_stochastic_rounding_has_no_bias(fmt: Format) -> None:
    draws = uniform(token_keys(torch.tensor([7]), torch.arange(1000), salt=1), 1000).flatten()
    for number in (0.07, 0.3, -1.1, 2.6, -4.25, 5.9):
        found = decode(encode(torch.full_like(draws, number), fmt, draws=draws), fmt).double()
        assert len(found.unique()) == 2
        assert abs(found.mean() - np.float32(number)) < 4 * found.std() / len(draws) ** 0.5


def test_an_e8m0_scale_is_the_least_power_of_two_that_saturates_nothing() -> None:
    """All codes that a finite fp32 magnitude can have: at the power of two, on both sides, and in the middle."""
    top = 127 - int(np.log2(E4M3.max))
    codes = torch.arange(127 + top, dtype=torch.uint8)
    at = (E4M3.max * torch.exp2(codes.double() - 127)).float()
    assert at.isfinite().all()
    for amax, expected in ((at, codes), (before(at), codes), (after(at), codes + 1), (at * 1.5, codes + 1)):
        assert torch.equal(mx_scale(amax[1:])[0], expected[1:])
    for amax, code in ((0.0, 0), (1e-45, 0), (at[0].item(), 0), (FP32_MAX, 128 + top), (INF, 254), (NAN, 255)):
        assert mx_scale(torch.tensor([amax]))[0].item() == code


def test_e8m0_decodes_to_powers_of_two() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(decode_e8m0(codes)[:255], torch.exp2(torch.arange(255).double() - 127).float())
    assert decode_e8m0(codes)[255].isnan()
    assert torch.equal(bits(decode_e8m0(codes.view(torch.float8_e8m0fnu))), bits(decode_e8m0(codes)))


def test_an_mx_multiplier_undoes_its_scale() -> None:
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes, multiplier = mx_scale(amax)
    assert torch.equal(multiplier.double() * torch.exp2(codes.double() - 127), torch.ones(len(amax)).double())


def test_the_scale_of_a_tensor() -> None:
    def scale(amax: float, **options: object) -> float:
        return tensor_scale(torch.tensor(amax), E4M3, **options).item()  # type: ignore[arg-type]

    assert scale(3.0, power_of_two=True) == 128
    assert scale(3.0) == np.float32(448) / np.float32(3)
    assert scale(3.0, margin=2) == np.float32(112) / np.float32(3)
    assert scale(0.0) == 1
    assert scale(INF) == 0
    assert np.isnan(scale(NAN, power_of_two=True))
    x = torch.tensor([[1.0, -3.0], [0.5, 1e-9]])
    found = quantize_tensor(x)
    assert found.scales.item() == (1 / np.float32(scale(3.0)))
    assert found.codes.float().tolist() == [[144.0, -448.0], [72.0, 0.0]]
    given_scale = quantize_tensor(x, scale=torch.tensor(1000.0), fmt=E5M2)
    assert given_scale.codes.float().tolist() == [[1024.0, -3072.0], [512.0, 0.0]]
    assert torch.equal(given_scale.dequantize(), given_scale.codes.float() * torch.tensor(1000.0).reciprocal())


def test_a_block_too_small_for_a_scale_takes_the_largest_number_of_its_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((2, 128), 2.0**-125, dtype=dtype)
        assert (quantize_fp8(x, block=(1, 128)).scales == 2.0**-127).all()
        exact = quantize_fp8(x, block=(1, 128), power_of_two=False)
        assert (exact.scales == 1 / torch.tensor(torch.finfo(dtype).max)).all()
        assert quantize_tensor(x).scales == exact.scales[0, 0]


def test_a_delayed_scale_waits_for_a_usable_magnitude() -> None:
    scale = torch.tensor(5.0)
    history = torch.tensor([2.0, 7.0, 0.0])
    assert delayed_scale(scale, history, E4M3).item() == 64
    assert delayed_scale(scale, history, E4M3, margin=1).item() == 32
    assert delayed_scale(scale, history, E5M2, algorithm="most_recent").item() == 57344 / 2
    for amax in (0.0, INF, NAN):
        assert delayed_scale(scale, torch.tensor([amax]), E4M3).item() == 5
    assert delayed_scale(scale, torch.tensor([1e-40]), E4M3).item() == FP32_MAX


QUANTIZERS = {
    "fp8 1x128": functools.partial(quantize_fp8, block=(1, 128)),
    "fp8 128x1": functools.partial(quantize_fp8, block=(128, 1)),
    "fp8 128x128": functools.partial(quantize_fp8, block=(128, 128)),
    "fp8 1x128 exact": functools.partial(quantize_fp8, block=(1, 128), power_of_two=False),
    "mxfp8 1x32": quantize_mxfp8,
    "mxfp8 32x1": functools.partial(quantize_mxfp8, block=(32, 1)),
    "mxfp8 32x32": functools.partial(quantize_mxfp8, block=(32, 32)),
    "nvfp4 1x16": quantize_nvfp4,
    "nvfp4 16x1": functools.partial(quantize_nvfp4, block=(16, 1)),
    "nvfp4 16x16": functools.partial(quantize_nvfp4, block=(16, 16)),
    "nvfp4 up": functools.partial(quantize_nvfp4, scales="up"),
}
EACH = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=list(QUANTIZERS))


@EACH
def test_a_value_comes_back_within_half_a_step(quantize: functools.partial[Quantized]) -> None:
    """Half a step is relative to the number, for small numbers to their block, or to the global scale."""
    x = random(3, 131, 149)
    found = quantize(x)
    rows, columns = found.block
    wide = torch.nn.functional.pad(x, (0, -149 % columns, 0, -131 % rows))
    blocks = wide.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).abs().amax((-3, -1))
    biggest = blocks.repeat_interleave(rows, -2)[:, :131].repeat_interleave(columns, -1)[..., :149]
    relative, absolute = {"e4m3": (2**-4, 2**-17), "e2m1": (0.0, 0.2)}[found.fmt.name]
    above = 0.0 if found.global_scale is None else 6 * 2**-10 * found.global_scale
    assert ((found.dequantize() - x).abs() <= relative * x.abs() + absolute * biggest + above).all()
    assert found.codes.stride(found.axis) == 1


@EACH
def test_one_huge_value_spoils_its_block_only(quantize: functools.partial[Quantized]) -> None:
    x = torch.zeros(256, 256)
    x[0, 0], x[0, 1], x[1, 0], x[255, 255] = -3e38, 1.0, 1.0, 2.0
    found = quantize(x)
    values = found.dequantize()
    assert values[0, 0] == pytest.approx(-3e38, rel=0.15)
    within = (0, 1) if found.block[1] > 1 else (1, 0)
    assert values[within] == 0
    assert values[255, 255] == (2 if found.global_scale is None else 0)
    assert values.count_nonzero() <= 3


@EACH
def test_zeros_stay_zeros(quantize: functools.partial[Quantized]) -> None:
    found = quantize(torch.zeros(130, 40))
    assert not found.codes.view(torch.uint8).any()
    assert not found.dequantize().any()
    assert (bits(found.scales) == (0x3F800000 if found.scales.dtype is torch.float32 else 0)).all()
    assert found.global_scale is None or found.global_scale == 1


@EACH
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_never_comes_back_finite(quantize: functools.partial[Quantized], bad: float) -> None:
    x = random(256, 256)
    x[3, 200] = bad
    found = quantize(x).dequantize()
    assert not found[3, 200].isfinite()
    if quantize(x).global_scale is None:
        assert found[200, 5].isfinite()
        assert (found[200] == quantize(random(256, 256)).dequantize()[200])[:128].all()
    else:
        broken = quantize_nvfp4(x, global_amax=torch.tensor(100.0)).dequantize()
        assert broken[3, 192:208].isnan().all()
        assert broken.isnan().sum() == 16


@EACH
def test_a_ragged_block_is_one_filled_up_with_zeros(quantize: functools.partial[Quantized]) -> None:
    x = random(2, 131, 37, dtype=torch.bfloat16)
    ragged, full = quantize(x), quantize(torch.nn.functional.pad(x, (0, 91, 0, 125)))
    assert torch.equal(ragged.dequantize(), full.dequantize()[:, :131, :37])
    down, across = ragged.scales.shape[-2:]
    assert torch.equal(bits(ragged.scales), bits(full.scales)[:, :down, :across])
    rows, columns = ragged.block
    assert (down, across) == (-(-131 // rows), -(-37 // columns))


def test_both_orientations_are_the_two_single_ones() -> None:
    x = random(131, 200, dtype=torch.bfloat16)
    row, column = quantize_fp8_both(x, power_of_two=False)
    same(row, quantize_fp8(x, block=(1, 128), power_of_two=False))
    same(column, quantize_fp8(x, block=(128, 1), power_of_two=False))
    row, column = quantize_mxfp8_both(x)
    same(row, quantize_mxfp8(x, block=(1, 32)))
    same(column, quantize_mxfp8(x, block=(32, 1)))


@pytest.mark.parametrize(("quantize", "size"), [(quantize_fp8, 128), (quantize_mxfp8, 32), (quantize_nvfp4, 16)])
def test_a_column_copy_is_the_row_copy_of_the_transpose(quantize: functools.partial[Quantized], size: int) -> None:
    x = random(2, 131, 150)
    same(quantize(x, block=(size, 1)), quantize(x.mT.contiguous(), block=(1, size)).mT)


@pytest.mark.parametrize(("quantize", "size"), [(quantize_fp8, 128), (quantize_mxfp8, 32), (quantize_nvfp4, 16)])
def test_square_blocks_make_the_transpose_of_a_result_the_result_of_the_transpose(
    quantize: functools.partial[Quantized], size: int
) -> None:
    x = random(131, 150)
    there, back = quantize(x, block=(size, size)), quantize(x.mT, block=(size, size))
    same(there.along(-2).mT, back)
    same(back.along(-2).mT, there)
    assert torch.equal(there.mT.dequantize(), there.dequantize().mT)
    assert torch.equal(there.along(-2).dequantize(), there.dequantize())
    assert there.along(-2).codes.stride(-2) == 1
    rows = quantize(x, block=(1, size))
    with pytest.raises(ValueError, match="quantize the tensor itself"):
        rows.along(-2)


def test_nvfp4_takes_a_second_level_for_each_expert() -> None:
    x = random(4, 32, 48) * torch.tensor([1.0, 100.0, 1e-4, 0.0]).view(4, 1, 1)
    found = quantize_nvfp4(x, block=(16, 16), global_amax=x.abs().amax((1, 2)))
    for expert in range(4):
        alone = quantize_nvfp4(x[expert], block=(16, 16))
        assert torch.equal(found.codes[expert], alone.codes)
        assert torch.equal(found.dequantize()[expert], alone.dequantize())


@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
def test_stochastic_nvfp4_depends_on_its_keys_alone_and_has_no_bias(block: tuple[int, int]) -> None:
    """Every block contains six and has an exact scale, so that nothing saturates."""
    numbers_C = random(48).clamp(-5.9, 5.9)
    x = numbers_C.expand(20_000, 48).clone()
    x[::16], x[:, ::16] = 6.0, -6.0
    keys, amax = token_keys(torch.tensor([3]), torch.arange(20_000), salt=2), torch.tensor(2688.0)
    values = quantize_nvfp4(x, block=block, keys=keys, global_amax=amax).dequantize()
    part = quantize_nvfp4(x[160:320], block=block, keys=keys[160:320], global_amax=amax)
    assert torch.equal(part.dequantize(), values[160:320])
    other = quantize_nvfp4(x, block=block, keys=keys + 1, global_amax=amax)
    assert not torch.equal(other.dequantize(), values)
    drawn = values.view(-1, 16, 48)[:, 1:].flatten(0, 1).double()
    allowed = 4 * drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - x[1]).abs() <= allowed).all()
    assert (drawn.std(0) > 0).sum() == 45


@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
def test_stochastic_nvfp4_has_no_bias_at_all_if_scales_are_rounded_up(block: tuple[int, int]) -> None:
    """To nearest, the largest number of a block with a scale that is rounded down saturates: here by 1/17."""
    x = random(64, 64).clamp(-5.0, 5.0)
    x[::16], x[:, ::16] = 6.375, 6.375  # a scale of 1.0625 lies between the E4M3 numbers 1 and 1.125
    keys = token_keys(torch.arange(2_000), torch.arange(64), salt=2).view(2_000, 64)
    many = x.expand(2_000, 64, 64)
    amax = torch.tensor(2688.0)
    for scales, at_most in (("nearest", 6.0), ("up", 6.75)):
        values = quantize_nvfp4(many, block=block, keys=keys, global_amax=amax, scales=scales).dequantize()
        assert values.max() == at_most
        bias = values.double().mean(0) - x
        if scales == "nearest":
            assert (bias[x == 6.375] == -0.375).all()
        else:
            widest_step = 2 * 1.125
            assert bias.abs().max() <= 5 * widest_step / 2 / 2_000**0.5


shapes = st.tuples(st.sampled_from([0, 1, 2, 3, 7, 16, 17, 31, 127, 131]), st.sampled_from([0, 1, 2, 13, 16, 33, 129]))


@settings(max_examples=60)
@given(shapes, st.sampled_from([(), (1,), (0,), (2, 3)]), st.sampled_from(sorted(QUANTIZERS)), st.booleans())
def test_shapes_and_strides_change_nothing(
    shape: tuple[int, int], batch: tuple[int, ...], name: str, transposed: bool
) -> None:
    rows, columns = shape
    wide = random(*batch, 2 * rows, 3 * columns)
    x = wide[..., ::2, 1::3] if columns else wide[..., ::2, :]
    x = x.mT if transposed else x
    found = QUANTIZERS[name](x)
    same(found, QUANTIZERS[name](x.clone(memory_format=torch.contiguous_format)))
    assert found.dequantize().shape == x.shape


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(4, 32)
    with pytest.raises(ValueError, match="no blocks of 1x64 here: use one of 1x128, 128x1, 128x128"):
        quantize_fp8(x, block=(1, 64))
    with pytest.raises(ValueError, match="use quantize_nvfp4"):
        quantize_tensor(x, fmt=E2M1)
    with pytest.raises(ValueError, match=r"cannot quantize torch.float64 \(4, 32\)"):
        quantize_tensor(x.double())
    with pytest.raises(ValueError, match=r"give one for each row: torch.int64 \(4,\)"):
        quantize_nvfp4(x, keys=torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"one for each matrix: \(\)"):
        quantize_nvfp4(x, global_amax=torch.zeros(2))
    with pytest.raises(ValueError, match=r"one for each matrix: \(\)"):
        quantize_nvfp4_both(x, global_amax=torch.zeros(2))
    with pytest.raises(ValueError, match=r"mixes 16 rows, and \(4, 32\) has 4: pad with zeros"):
        matrix_amax(x, hadamard=True)
    with pytest.raises(ValueError, match="a block of 16x1: these are 1x16"):
        quantize_nvfp4(x.mT, hadamard=True)
