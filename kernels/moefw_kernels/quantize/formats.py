"""Small number formats and casts of single numbers. Exact on every device: only the last step of a cast rounds.

With m mantissa bits, a number in [2^e, 2^(e+1)) lies on a grid of step 2^(e-m); below the smallest normal number 2^n
the step stays 2^(n-m). So code = (max(e, n) - n) * 2^m + round(|x| / step), a sum that carries into the exponent by
itself (OCP 8-bit floating point specification, revision 1.0; OCP microscaling formats, version 1.0, section 5.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moefw_kernels.devices import runs_ahead


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format of at most eight bits: a sign, an exponent, a mantissa.

    ``dtype`` is the dtype of stored codes; E2M1 has two codes in a byte. ``min_exponent`` is the exponent of the
    smallest normal number. ``nan_code`` is the code of NaN of any sign: NaN, or in E2M1, which has none, the largest
    number (as ``cvt`` of PTX does).
    """

    name: str
    dtype: torch.dtype
    max: float
    min_exponent: int
    mantissa_bits: int
    sign_bit: int
    nan_code: int


E4M3: Final = Format(
    name="e4m3",
    dtype=torch.float8_e4m3fn,
    max=448.0,
    min_exponent=-6,
    mantissa_bits=3,
    sign_bit=7,
    nan_code=0x7F,
)
E5M2: Final = Format(
    name="e5m2",
    dtype=torch.float8_e5m2,
    max=57344.0,
    min_exponent=-14,
    mantissa_bits=2,
    sign_bit=7,
    nan_code=0x7F,
)
E2M1: Final = Format(
    name="e2m1",
    dtype=torch.uint8,
    max=6.0,
    min_exponent=0,
    mantissa_bits=1,
    sign_bit=3,
    nan_code=0x7,
)


def encode(x: Tensor, fmt: Format, *, draws: Tensor | None = None) -> Tensor:
    """Code of each number: uint8, the shape of ``x``, which is fp32, fp16 or bf16.

    Rounds to nearest, ties to the even code. With ``draws``, fp32 in [0, 1) of the same shape, rounds away from zero
    where the number's distance to its lower neighbour, in units of that interval, exceeds the draw: never further than
    a neighbour, and unbiased up to the largest number. Numbers beyond that, including infinity, saturate to it.
    """
    if draws is None and fmt is not E2M1:
        codes = x.float().clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
        # Every NaN gets one code. NaN is all ones but for the sign, so that adding 1 carries into the sign bit.
        sign_of_nan = (codes & fmt.nan_code).add_(1).bitwise_and_(0x80)
        return codes.bitwise_and_(sign_of_nan.bitwise_not_())
    number = x.float().nan_to_num(nan=fmt.max, posinf=fmt.max, neginf=-fmt.max)
    magnitude = number.abs().clamp_(max=fmt.max)
    # The magnitude in steps of the grid, an exact product: the step is a power of two. Then the formula of this module.
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp_(min=fmt.min_exponent)
    steps = magnitude.mul_(((127 + fmt.mantissa_bits - exponent) << 23).view(torch.float32))
    if draws is None:
        rounded = steps.round_()
    else:
        lower = steps.floor()
        rounded = lower.add_(steps.sub_(lower) > draws)
    codes = (exponent.sub_(fmt.min_exponent) << fmt.mantissa_bits).add_(rounded.int())
    codes |= (number.view(torch.int32) >> 31 & 1) << fmt.sign_bit
    codes = codes.to(torch.uint8)
    return codes if fmt is E2M1 else codes.masked_fill_(x.isnan(), fmt.nan_code)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Number of each uint8 code in fp32, exact; the inverse of ``encode``.

    Uses a table on a CPU, where torch casts one number at a time.
    """
    if runs_ahead(codes.device):
        return decode_e2m1(codes) if fmt is E2M1 else codes.view(fmt.dtype).float()
    values = torch.arange(256, dtype=torch.uint8)
    values = decode_e2m1(values[:16]) if fmt is E2M1 else values.view(fmt.dtype).float()
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Number of each four-bit code in fp32, by arithmetic: a table would have to be copied to the device.

    The magnitudes of codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
    """
    steps = (codes & 7).float()
    magnitude = torch.where(steps < 4, steps / 2, torch.where(steps < 6, steps - 2, 2 * steps - 8))
    return torch.where(codes < 8, magnitude, -magnitude)


def decode_e8m0(codes: Tensor) -> Tensor:
    """``2^(code - 127)`` of uint8 or float8_e8m0fnu codes in fp32, exact; NaN for 255."""
    codes = codes.view(torch.uint8).int()
    bits = codes << 23
    bits = torch.where(codes == 0, 0x00400000, bits)  # 2^-127 is subnormal in fp32
    bits = torch.where(codes == 255, 0x7FC00000, bits)  # NaN
    return bits.view(torch.float32)


def pack(codes: Tensor, *, axis: int = -1) -> Tensor:
    """Two four-bit codes in each byte, the even one in the low nibble: ``(..., ceil(n / 2), ...)`` uint8.

    Contiguous along ``axis``. An unused last nibble is zero.
    """
    codes = codes.movedim(axis, -1)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous().movedim(-1, axis)


def unpack(packed: Tensor, *, count: int, axis: int = -1) -> Tensor:
    """``count`` codes that ``pack`` put along ``axis``, one in each byte."""
    packed = packed.movedim(axis, -1)
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    return codes[..., :count].movedim(-1, axis)
