"""What the kernels share: numbers as bits, casts to small formats, groups of rows, and tiles of matrices.

Casts to FP8 are instructions of the GPU where it has them. Everywhere else, and for E2M1, casts work on bits and on
products with powers of two, which are exact.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

ONE: Final = tl.constexpr(0x3F800000)
INF: Final = tl.constexpr(0x7F800000)
NAN: Final = tl.constexpr(0x7FC00000)
FP32_MAX: Final = tl.constexpr(0x7F7FFFFF)
E4M3_MAX: Final = tl.constexpr(0x43E00000)
E5M2_MAX: Final = tl.constexpr(0x47600000)
E2M1_MAX: Final = tl.constexpr(0x40C00000)


@triton.jit
def as_bits(x):
    """Bits of fp32 numbers as integers."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """Numbers of bits: the inverse of ``as_bits``."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """Bits of |x|: integers in the order of the numbers, with infinity and then NaN above all."""
    return as_bits(x) & 0x7FFFFFFF


@triton.jit
def encode_e4m3(x, CVT: tl.constexpr):
    """Codes of E4M3, rounded to nearest, in uint8. CVT: by a saturating instruction of the GPU."""
    if CVT:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        code = tl.where(magnitude(x) > INF, 0x7F, code)
    else:
        code = encode(x, None, M=3, LEAST=-6, MAX=E4M3_MAX, SIGN=7, OF_NAN=0x7F)
    return code.to(tl.uint8)


@triton.jit
def encode_e5m2(x, CVT: tl.constexpr):
    """Codes of E5M2, rounded to nearest, in uint8. CVT: by an instruction of the GPU, after a bound on ``x``."""
    if CVT:
        bounded = as_float(tl.minimum(magnitude(x), E5M2_MAX) | (as_bits(x) & -0x80000000))
        code = bounded.to(tl.float8e5).to(tl.uint8, bitcast=True)
        code = tl.where(magnitude(x) > INF, 0x7F, code)
    else:
        code = encode(x, None, M=2, LEAST=-14, MAX=E5M2_MAX, SIGN=7, OF_NAN=0x7F)
    return code.to(tl.uint8)


@triton.jit
def encode(
    x, draws,
    M: tl.constexpr, LEAST: tl.constexpr, MAX: tl.constexpr, SIGN: tl.constexpr, OF_NAN: tl.constexpr,
):  # fmt: skip
    """Codes of ``formats.encode`` in int32. LEAST: smallest normal exponent, MAX: bits of the largest number."""
    absolute = tl.minimum(magnitude(x), MAX)
    exponent = tl.maximum((absolute >> 23) - 127, LEAST)
    steps = as_float(absolute) * as_float((127 + M - exponent) << 23)
    lower = steps.to(tl.int32)
    rest = steps - lower.to(tl.float32)
    if draws is None:  # noqa: SIM108
        up = (rest > 0.5) | ((rest == 0.5) & ((lower & 1) == 1))
    else:
        up = rest > draws
    code = ((exponent - LEAST) << M) + lower + up.to(tl.int32)
    return tl.where(magnitude(x) > INF, OF_NAN, code | (((as_bits(x) >> 31) & 1) << SIGN))


@triton.jit
def divide(number: tl.constexpr, by):
    """``number / by`` rounded once, as ``scales.divide``."""
    return tl.div_rn(tl.full(by.shape, number, tl.float32), by)


@triton.jit
def _group_of(row, ends, groups, STEPS: tl.constexpr):
    """Group in which one row lies, as ``groups.group_of_row``, by a search in STEPS, the bits of ``groups``."""
    found = (row * 0).to(tl.int32)
    for step in tl.static_range(STEPS):
        further = found + (1 << (STEPS - 1 - step))
        end = tl.load(ends + further - 1, mask=further <= groups, other=0)
        found = tl.where((further <= groups) & (end <= row), further, found)
    return found


@triton.jit
def of_groups(values, rows, first, last, ends, groups, other, STEPS: tl.constexpr):
    """Value of the group in which each of these rows lies; ``other`` past the last group.

    Rows lie between ``first`` and ``last``, mostly in one group: numbers are loaded for each group, not for each row.
    """
    found = tl.zeros(rows.shape, tl.float32) + other
    behind = tl.minimum(_group_of(last, ends, groups, STEPS) + 1, groups)
    for group in range(_group_of(first, ends, groups, STEPS), behind):
        begin = tl.load(ends + group - 1, mask=group > 0, other=0)
        found = tl.where(rows >= begin, tl.load(values + group), found)
    return tl.where(rows < tl.load(ends + groups - 1), found, other)


@triton.jit
def store(pointer, tile, r0, c0, rows, columns):
    """Store the tile at row ``r0`` and column ``c0`` of a (rows, columns) matrix."""
    r = r0 + tl.arange(0, tile.shape[0])[:, None].to(tl.int64)
    c = c0 + tl.arange(0, tile.shape[1])[None, :].to(tl.int64)
    tl.store(pointer + r * columns + c, tile, mask=(r < rows) & (c < columns))


@triton.jit
def load_tile(x, r0, c0, rows, columns, r_stride, c_stride, R: tl.constexpr, C: tl.constexpr):
    """Load a tile (R, C) of a (rows, columns) matrix in fp32, with zeros outside."""
    r = r0 + tl.arange(0, R)[:, None].to(tl.int64)
    c = c0 + tl.arange(0, C)[None, :].to(tl.int64)
    inside = (r < rows) & (c < columns)
    return tl.load(x + r * r_stride + c * c_stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def place_of_tile(rows, columns, R: tl.constexpr, C: tl.constexpr):
    """Matrix of this program and the first row and column of its tile."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(columns, C)
    tiles = tl.cdiv(rows, R) * across
    return program // tiles, program % tiles // across * R, program % tiles % across * C


def is_empty(x: Tensor, ends_e: Tensor | None) -> bool:
    """Whether there is nothing for a kernel: no numbers, or no groups in which they are."""
    return not x.numel() or (ends_e is not None and not len(ends_e))


def matrices(x: Tensor) -> Tensor:
    """``x`` (..., R, C) as one batch of matrices (B, R, C)."""
    return x.reshape(-1, *x.shape[-2:]) if x.numel() else x.new_empty(0, *x.shape[-2:])
