"""Functions that Triton kernels of routers call: keys in the order of floats, scores and their slopes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from moefw_kernels.routing.scores import LINEAR_ABOVE

NONE: Final = tl.constexpr(-(2**63))
"""Below all keys."""
TINY: Final = tl.constexpr(torch.finfo(torch.float32).tiny)
_LINEAR_ABOVE: Final = tl.constexpr(LINEAR_ABOVE)
ELEMENTS: Final = 1024
"""Logits that a program looks at together, at least those of one token."""


@triton.jit
def ordered(x):
    """Integers in the order of floats, NaN last, and 0 for -0."""
    # The bits of floats are signed magnitudes: those of negative ones ascend as the floats descend, so all but the sign
    # are inverted.
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0, bits)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def keys_of(x, place, PLACES: tl.constexpr):
    """Keys: unequal integers in the order of floats; of equal floats, the one at the lowest place is largest."""
    return (ordered(x) << 32) | (PLACES - 1 - place).to(tl.int64)


@triton.jit
def value_of(key):
    """Float of a key."""
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp(x, COMPILED: tl.constexpr):
    """``e^x`` as CUDA has it."""
    if COMPILED:  # noqa: SIM108
        power = libdevice.exp(x)
    else:
        power = tl.exp(x)
    return power


@triton.jit
def sigmoid(x, COMPILED: tl.constexpr):
    """``1 / (1 + e^-x)``."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x, COMPILED))


@triton.jit
def log1p(x, COMPILED: tl.constexpr):
    """``log(1 + x)``. The interpreter has no log1p: what rounding adds to 1 + x is taken out by a ratio."""
    if COMPILED:
        logarithm = libdevice.log1p(x)
    else:
        one_plus_x = 1.0 + x
        logarithm = tl.where(
            one_plus_x == 1.0, x, tl.log(one_plus_x) * (x / tl.where(one_plus_x == 1.0, 1.0, one_plus_x - 1.0))
        )
    return logarithm


@triton.jit
def log(x, COMPILED: tl.constexpr):
    """Natural logarithm as CUDA has it."""
    if COMPILED:  # noqa: SIM108
        logarithm = libdevice.log(x)
    else:
        logarithm = tl.log(x)
    return logarithm


@triton.jit
def score_of(x, SCORE: tl.constexpr, COMPILED: tl.constexpr):
    """Scores that depend on their own logit alone."""
    if SCORE == "sigmoid":
        score = sigmoid(x, COMPILED)
    else:
        soft = log1p(exp(tl.minimum(x, _LINEAR_ABOVE), COMPILED), COMPILED)
        score = tl.sqrt_rn(tl.maximum(tl.where(x > _LINEAR_ABOVE, x, soft), TINY))
    return score


@triton.jit
def slope_of(x, score, SCORE: tl.constexpr, COMPILED: tl.constexpr):
    """Slope of ``score_of``, ``score`` being its result; 0 where sqrtsoftplus is clamped."""
    if SCORE == "sigmoid":
        slope = score * (1.0 - score)
    else:
        slope = tl.div_rn(sigmoid(x, COMPILED), 2.0 * score)
        slope = tl.where(score * score < TINY, 0.0, slope)
    return slope


@triton.jit
def softmax(x, COMPILED: tl.constexpr):
    """Softmax of each row. Experts that do not exist have logits of -inf."""
    power = exp(x - tl.max(x, 1)[:, None], COMPILED)
    return tl.div_rn(power, tl.broadcast_to(tl.sum(power, 1)[:, None], power.shape))


@triton.jit
def entropy_of(scores, COMPILED: tl.constexpr):
    """Entropy of each row divided by its sum; scores are not negative, and 0 for experts that do not exist."""
    total = tl.maximum(tl.sum(scores, 1), TINY)[:, None]
    shares = tl.div_rn(scores, tl.broadcast_to(total, scores.shape))
    # 0 ln 0 is 0. NaN is not 0 and stays.
    return -tl.sum(tl.where(shares == 0.0, 0.0, shares * log(shares, COMPILED)), 1)


def together(width: int) -> int:
    """How many tokens with ``width`` logits, a power of two, a program looks at together."""
    return max(1, ELEMENTS // width)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Tensor contiguous, as kernels read it."""
    return None if tensor is None else tensor.contiguous()
