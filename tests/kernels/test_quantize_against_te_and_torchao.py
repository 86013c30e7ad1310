"""The encoders equal others: Transformer Engine by a reimplementation of its rules, torchao itself."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_quantize import FP32_MAX, INF, NAN, after, before, bits, numbers, random
from torch import Tensor

from moefw_kernels.quantize import (
    E2M1,
    E4M3,
    E5M2,
    Format,
    encode,
    mx_scale,
    quantize_mxfp8,
    quantize_nvfp4,
    tensor_scale,
)


def te_e8m0(amax: np.ndarray) -> np.ndarray:
    """Transformer Engine: the exponent of ``amax * fl(1 / max)``, raised if a bit of the mantissa is set."""
    word = (amax * np.float32(1.0 / E4M3.max)).view(np.uint32)
    exponent, mantissa = word >> 23, word & 0x7FFFFF
    return exponent + ((mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000)))


def test_e8m0_scales_are_those_of_transformer_engine_but_for_one_number() -> None:
    mantissas = np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)
    least = np.float32(E4M3.max * 2.0**-127).view(np.uint32)
    beside = np.arange(-1000, 1000).astype(np.int64) + int(least)
    steps = np.concatenate([mantissas[::7], mantissas[-5:], beside.astype(np.uint32)]).view(np.float32)
    steps = np.concatenate([steps, np.nextafter(np.float32(E4M3.max), np.float32([0, INF])), np.float32([E4M3.max])])
    mine = mx_scale(torch.from_numpy(steps))[0].numpy()
    differ = steps[mine != te_e8m0(steps)]
    assert differ.tolist() == [np.nextafter(np.float32(E4M3.max * 2.0**-127), np.float32(1))]


def te_scale(amax: Tensor, fmt: Format, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """The reference of Transformer Engine's tests, with ``frexp``."""
    scale = torch.div(torch.tensor(fmt.max), amax)
    scale = torch.where(scale == INF, torch.finfo(dtype).max, scale)
    if power_of_two:
        scale = torch.where(amax == INF, 0.0, torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1))
    return torch.where(amax == 0, 1.0, scale)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp32_scales_are_those_of_transformer_engine(dtype: torch.dtype, power_of_two: bool) -> None:
    amax = torch.arange(0, 0x7F80_0001, 0x1FFF, dtype=torch.int32).view(torch.float32)
    amax = torch.cat([amax, torch.tensor([0.0, 1e-45, FP32_MAX, INF]), 448 * torch.exp2(torch.arange(-100.0, 100))])
    for fmt in (E4M3, E5M2):
        found = tensor_scale(amax, fmt, power_of_two=power_of_two, largest=torch.finfo(dtype).max)
        assert torch.equal(found, te_scale(amax, fmt, dtype, power_of_two))


def te_nvfp4(x: Tensor, global_amax: Tensor) -> tuple[Tensor, Tensor]:
    """Transformer Engine's rule, with thresholds for the elements: codes, one each, and scales."""
    encoder = torch.minimum(torch.div(torch.tensor(2688.0), global_amax), torch.tensor(FP32_MAX))
    encoder = torch.ones(()) if global_amax == 0 else encoder
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = blocks.abs().amax(-1) * (encoder * torch.tensor(1 / 6))
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn)
    inverse = (1 / (scale.float() * (1 / encoder))).clamp(max=FP32_MAX)
    scaled = (blocks * inverse.unsqueeze(-1)).flatten(-2)
    size = scaled.abs()
    code = (size > 0.25).int() + (size >= 0.75) + (size > 1.25) + (size >= 1.75) + (size > 2.5) + (size >= 3.5)
    return (code + (size > 5) + 8 * scaled.signbit()).to(torch.uint8), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_is_that_of_transformer_engine(dtype: torch.dtype) -> None:
    for x in (random(200, 128, dtype=dtype), torch.zeros(3, 32, dtype=dtype), 1e-38 * random(20, 32, dtype=dtype)):
        for global_amax in (x.abs().amax().float(), torch.tensor(1.7), torch.tensor(1e-37), torch.tensor(0.0)):
            codes, scales = te_nvfp4(x, global_amax)
            found = quantize_nvfp4(x, global_amax=global_amax)
            assert torch.equal(bits(found.scales), bits(scales))
            assert torch.equal(found.codes, codes[:, ::2] | codes[:, 1::2] << 4)


def test_nvfp4_scales_round_as_those_of_transformer_engine_beside_every_midpoint() -> None:
    """The order of two multiplications matters only near midpoints of E4M3, so test 2 ulp around each of them."""
    scales = numbers(E4M3)
    middles = (scales[1:] + scales[:-1]) / 2
    for global_amax in (random(12).abs() + 0.01).tolist():
        largest = (middles.double() * 6 * global_amax / 2688).float()
        near = (largest.view(torch.int32).unsqueeze(1) + torch.arange(-2, 3)).view(torch.float32)
        x = torch.zeros(near.numel(), 16)
        x[:, 3] = near.flatten()
        level = torch.tensor(global_amax)
        assert torch.equal(bits(quantize_nvfp4(x, global_amax=level).scales), bits(te_nvfp4(x, level)[1]))


@pytest.fixture(scope="module")
def torchao() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    return SimpleNamespace(
        mode=ScaleCalculationMode,
        mx=MXTensor,
        nvfp4=NVFP4Tensor,
        to_scale=per_tensor_amax_to_scale,
        e2m1=f32_to_f4_unpacked,
    )


def every_magnitude() -> Tensor:
    """Blocks of 32 whose largest magnitude is each bf16 number in turn, and random blocks of fp32 numbers."""
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    inner = torch.rand(len(amax), 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    blocks = (inner * amax.unsqueeze(1)).clamp(-FP32_MAX, FP32_MAX)
    blocks[:, 5] = -amax
    return torch.cat([blocks, random(4000, 32, seed=2)])


def test_mxfp8_is_that_of_torchao(torchao: SimpleNamespace) -> None:
    x = every_magnitude()
    theirs = torchao.mx.to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=torchao.mode.RCEIL)
    mine = quantize_mxfp8(x)
    assert torch.equal(bits(mine.scales), bits(theirs.scale).view_as(mine.scales))
    least = (bits(mine.scales) == 0).squeeze(1)
    assert least.sum() < 2200
    assert torch.equal(bits(mine.codes)[~least], bits(theirs.qdata)[~least])
    assert not (bits(theirs.qdata)[least] == bits(mine.codes)[least]).all(), "torchao decodes other numbers there"


def test_torchao_takes_a_logarithm_that_rounds(torchao: SimpleNamespace) -> None:
    """Just above 448 * 2^40 the scale must be the next power of two, or the block saturates."""
    x = torch.zeros(1, 32)
    x[0, 7] = after(torch.tensor(448 * 2.0**40))
    theirs = torchao.mx.to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=torchao.mode.RCEIL)
    assert bits(theirs.scale).item() == 127 + 40
    assert bits(quantize_mxfp8(x).scales).item() == 127 + 41 == te_e8m0(x.amax().numpy())


def test_an_infinity_in_mxfp8_is_that_of_torchao(torchao: SimpleNamespace) -> None:
    x = random(4, 64)
    x[1, 3], x[2, 40], x[3, 0] = INF, -INF, NAN
    theirs = torchao.mx.to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=torchao.mode.RCEIL)
    mine = quantize_mxfp8(x)
    assert torch.equal(bits(mine.scales), bits(theirs.scale))
    assert torch.equal(bits(mine.codes)[:3], bits(theirs.qdata)[:3])
    assert mine.dequantize()[3, :32].isnan().all()
    assert theirs.dequantize(torch.float32)[3, :32].isnan().all()


def test_e2m1_codes_are_those_of_torchao(torchao: SimpleNamespace) -> None:
    values = numbers(E2M1)
    x = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.randn(100_000) * 3, torch.tensor([INF, 1e-45])])
    x = torch.cat([x, after(x[:15]), before(x[:15])])
    x = torch.cat([x, -x])
    assert torch.equal(encode(x, E2M1), torchao.e2m1(x))


@pytest.mark.parametrize("exponent", [-20, -1, 0, 3, 40])
def test_nvfp4_is_that_of_torchao_where_the_global_scale_is_a_power_of_two(
    torchao: SimpleNamespace, exponent: int
) -> None:
    """Neither rounds it then. Below the least normal block scale, 2^-6, torchao clamps and Transformer Engine does not."""
    x = every_magnitude()[18000:]
    global_amax = torch.tensor(2688.0 * 2.0**exponent)
    x = x * (global_amax / x.abs().amax(1, keepdim=True) * torch.logspace(-3, 0, len(x)).unsqueeze(1))
    theirs = torchao.nvfp4.to_nvfp4(x, per_tensor_scale=torchao.to_scale(global_amax))
    mine = quantize_nvfp4(x, global_amax=global_amax)
    normal = mine.scales.float() >= 2**-6
    assert normal.sum() > 20_000
    assert mine.global_scale == theirs.per_tensor_scale
    assert torch.equal(bits(mine.scales)[normal], bits(theirs.scale)[normal])
    codes = normal.repeat_interleave(8, -1)
    assert torch.equal(mine.codes[codes], theirs.qdata[codes])


def test_nvfp4_differs_from_torchao_by_rounding_only(torchao: SimpleNamespace) -> None:
    x = random(2000, 64)
    global_amax = x.abs().amax()
    theirs = torchao.nvfp4.to_nvfp4(x, per_tensor_scale=torchao.to_scale(global_amax))
    mine = quantize_nvfp4(x)
    normal = mine.scales.float() >= 2**-6
    assert (bits(mine.scales) != bits(theirs.scale))[normal].float().mean() < 0.002
    assert (mine.codes != theirs.qdata)[normal.repeat_interleave(8, -1)].float().mean() < 0.002
