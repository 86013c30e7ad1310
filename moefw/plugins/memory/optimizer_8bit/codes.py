"""Codes of 8 bits in dynamic exponent format, with a scale for each block of a row (arXiv 2110.02861, section 2).

The format is that of the 8-bit optimizers of bitsandbytes and torchao. R rows, C columns, n blocks of a row.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

NUM_CODES: Final = 256
DECADES: Final = 7
"""Number of powers of ten that codes span."""
SMALLEST_SCALE: Final = 1e-12
"""Smallest scale. A block of zeros has it."""
DRAWN_BITS: Final = 24
"""Number of random bits that round a value: as many as fp32 has in its fraction."""


def table(*, signed: bool) -> Tensor:
    """The values of all codes, ascending, from -1 or 0 to 1: ``(256)`` fp32 on the CPU.

    In each power of ten, values are the centres of equal intervals from a tenth of it up to it. Each power has twice as
    many as the next smaller one, the largest 64 (128 unsigned). Besides, there are 0 and 1.
    """
    magnitudes = []
    for decade in range(DECADES):
        intervals = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, intervals + 1, device="cpu")
        magnitudes.append(10 ** (decade + 1 - DECADES) * ((edges[:-1] + edges[1:]) / 2.0))
    positive = torch.cat(magnitudes)
    values = [positive, torch.tensor([0.0, 1.0], device="cpu")]
    if signed:
        values.append(-positive)
    return torch.cat(values).sort().values


def encoded(x_RC: Tensor, table: Tensor, block: int, *, signed: bool, bits_RC: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes ``(R, C)`` uint8 and scales ``(R, n)`` fp32 of fp32 ``x_RC``; there may be more dimensions in place of R.

    A scale is the largest magnitude of its block. ``bits_RC``: int64, of which the low ``DRAWN_BITS`` round at random:
    the probability of the code above is the fraction of the way to it. A value is its own code's where it is one. None:
    values are rounded to the nearest code, from the middle upwards.

    Where codes are not ``signed``, rounding at random makes no value above zero zero: optimizers divide by the root of
    such a state. A block that holds NaN or infinity has a scale that is not finite.
    """
    num_columns = x_RC.shape[-1]
    blocks_RnB = _in_blocks(x_RC, block)
    scales_Rn = blocks_RnB.abs().amax(-1).clip(SMALLEST_SCALE)
    # From here on x is within -1 and 1.
    x_RC = (blocks_RnB / scales_Rn.unsqueeze(-1)).flatten(-2)[..., :num_columns].contiguous()
    below_RC = (torch.bucketize(x_RC, table, out_int32=True, right=True) - 1).clip_(0)
    above_RC = (below_RC + 1).clip_(max=NUM_CODES - 1)
    low_RC = table[below_RC]
    gap_RC = table[above_RC] - low_RC
    way_RC = x_RC - low_RC
    if bits_RC is None:
        rises_RC = way_RC >= gap_RC * 0.5
    else:
        drawn_RC = (bits_RC & ((1 << DRAWN_BITS) - 1)).float().mul_(2.0**-DRAWN_BITS)
        rises_RC = drawn_RC * gap_RC < way_RC
        if not signed:
            rises_RC |= (below_RC == 0) & (x_RC > 0)
    return torch.where(rises_RC, above_RC, below_RC).to(torch.uint8), scales_Rn


def decoded(codes_RC: Tensor, scales_Rn: Tensor, table: Tensor, block: int) -> Tensor:
    """Values ``(R, C)`` fp32 of codes and scales, contiguous."""
    num_columns = codes_RC.shape[-1]
    blocks_RnB = _in_blocks(table[codes_RC.int()], block)
    # Fused optimizers read a state as if it lay in memory as its parameter does.
    return (blocks_RnB * scales_Rn.unsqueeze(-1)).flatten(-2)[..., :num_columns].contiguous()


def _in_blocks(x_RC: Tensor, block: int) -> Tensor:
    """Blocks ``(R, n, B)`` of rows. Where the last block of a row is shorter, zeros fill it up.

    A row that is shorter than a block is one.
    """
    num_columns = x_RC.shape[-1]
    width = min(block, num_columns)
    missing = -num_columns % width
    if missing:
        x_RC = pad(x_RC, (0, missing))
    blocks_RnB: Tensor = x_RC.unflatten(-1, (-1, width))
    return blocks_RnB
