"""Casts in Triton kernels: an instruction of the GPU where it has one, the same rounding in integers elsewhere.

Both round to nearest, ties to even. The interpreter needs the integers: it truncates to bf16, and rounds to FP8 in
another way. Only the bits of a NaN in bf16 differ.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl


def is_compiled() -> bool:
    """Whether kernels are compiled, not interpreted: the argument ``COMPILED`` of kernels."""
    return not triton.knobs.runtime.interpret


def casts_fp8(device: torch.device) -> bool:
    """Whether kernels are compiled for a GPU that casts fp32 to E4M3 and E5M2: compute capability 8.9."""
    return is_compiled() and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def as_dtype(x, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Round fp32 numbers to a dtype and return them in fp32."""
    if tl.bfloat16 == DTYPE:
        x = as_bf16(x, COMPILED)
    elif tl.float16 == DTYPE:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def as_bf16(x, COMPILED: tl.constexpr):
    """Round fp32 numbers to bf16 and return them in fp32."""
    if COMPILED:
        # Back to fp32 by a shift of the bits and not by a cast. LLVM would turn "exact cast, product, cast" into one
        # product in bf16, which rounds once where PyTorch rounds twice, below 2**-126.
        bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.int32, bitcast=True)
        # Half of the last bit that stays, less one if that bit is even, carries into it: nearest, ties to even.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)
    return bits.to(tl.float32, bitcast=True)
