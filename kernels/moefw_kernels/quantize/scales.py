"""Multiplier and stored scale of a block or tensor, from its largest magnitude.

If this magnitude is infinite or NaN, the block or tensor dequantizes to NaN or infinity.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from moefw_kernels.quantize.formats import E2M1, E4M3, Format, decode, decode_e8m0, encode

FP32_MAX: Final = torch.finfo(torch.float32).max
BlockScales = Literal["nearest", "up"]
"""How E4M3 scales of blocks are rounded."""


def divide(number: float, by: Tensor) -> Tensor:
    """``number / by`` rounded once; torch's ``number / by`` multiplies by a rounded reciprocal."""
    return torch.full_like(by, number).div_(by)


def tensor_scale(
    amax: Tensor, fmt: Format, *, margin: int = 0, power_of_two: bool = False, largest: float = FP32_MAX
) -> Tensor:
    """``fmt.max / 2^margin / amax``, the multiplier of numbers before the cast; fp32, the same shape.

    With ``power_of_two`` rounded down to one. 1 where ``amax`` is 0; ``largest`` where the quotient is beyond fp32
    (Transformer Engine takes the largest number of the input's dtype); 0 where ``amax`` is infinite, NaN where it is
    NaN. Source: ``compute_scale_from_amax`` of Transformer Engine, ``scale_from_amax_tensor`` of its tests.
    """
    scale = divide(fmt.max * 2.0**-margin, amax.float())
    scale = torch.where(scale.isposinf(), largest, scale)
    if power_of_two:
        # Without its mantissa, the number is rounded down to a power of two.
        scale = torch.where(scale.isnan(), scale, (scale.view(torch.int32) & -0x800000).view(torch.float32))
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isnan(), torch.nan, scale)


def delayed_scale(
    scale: Tensor,
    history_H: Tensor,
    fmt: Format,
    *,
    margin: int = 0,
    algorithm: Literal["max", "most_recent"] = "max",
) -> Tensor:
    """Next scale, fp32 ``(...)``, from the magnitudes ``(..., H)`` of past steps, the most recent first.

    ``scale`` is kept while the magnitude is zero, infinite or NaN. Source: ``delayed_scaling.cu`` of Transformer
    Engine.
    """
    amax = (history_H.amax(-1) if algorithm == "max" else history_H[..., 0]).float()
    next_scale = tensor_scale(amax, fmt, margin=margin)
    return torch.where(amax.isfinite() & (amax > 0), next_scale, scale)


def mx_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """E8M0 codes (uint8) of blocks of E4M3 with magnitude ``amax`` (fp32), and the multipliers of their numbers.

    The scale is the smallest power of two that is at least ``amax / 448``, so that nothing saturates (Transformer
    Engine, cuBLAS, ``ScaleCalculationMode.RCEIL`` of torchao). Integer arithmetic.
    """
    # Exponents are subtracted. The quotient is rounded up if the mantissa of ``amax`` is above that of 448.
    bits = amax.view(torch.int32)
    top = int(torch.tensor(E4M3.max).view(torch.int32))
    codes = (bits >> 23) - ((top >> 23) - 127)
    codes = codes + ((bits & 0x7FFFFF) > (top & 0x7FFFFF))
    codes = torch.where(amax.isposinf(), 254, codes)
    codes = torch.where(amax.isnan(), 255, codes.clamp(min=0)).to(torch.uint8)
    multiplier = decode_e8m0(torch.where(codes == 255, codes, 254 - codes))
    return codes, multiplier


def nvfp4_global_scale(global_amax: Tensor) -> tuple[Tensor, Tensor]:
    """``(448 * 6) / global_amax``, which encodes, and its reciprocal, which decodes, both fp32.

    Both are 1 where ``global_amax`` is 0. Source: ``compute_global_encode_scaling_factor_FP4`` of Transformer Engine.
    """
    encoder = divide(E4M3.max * E2M1.max, global_amax.float()).clamp(max=FP32_MAX)
    encoder = torch.where(global_amax == 0, 1.0, encoder)
    return encoder, encoder.reciprocal()


def nvfp4_scale(
    amax: Tensor, encoder: Tensor, decoder: Tensor, *, scales: BlockScales = "nearest"
) -> tuple[Tensor, Tensor]:
    """E4M3 codes (uint8) of blocks with magnitude ``amax`` (fp32), and the multipliers of their numbers.

    ``encoder`` and ``decoder`` come from ``nvfp4_global_scale``. ``scales``: a scale that is rounded to nearest may be
    up to 1/16 too small, and the largest numbers of its block then saturate; one that is rounded up never is. Source:
    ``compute_decoding_scaling_factor`` and ``block_scale_inverse`` in ``quantize_transpose_nvfp4.cuh`` of Transformer
    Engine, which rounds to nearest.
    """
    scale = amax * (encoder * (1.0 / 6.0))
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    codes = encode(scale, E4M3, draws=torch.zeros_like(scale) if scales == "up" else None)
    return codes, (decode(codes, E4M3) * decoder).reciprocal().clamp(max=FP32_MAX)
