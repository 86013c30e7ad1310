"""Rotary positions: a table of cosines and sines, and the rotation of queries and keys by it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moefw.core.stages import Batch
from moefw.runtime.attention.rope_options import Rope
from moefw_kernels import rope as kernels

Table = tuple[Tensor, Tensor]
"""Cosines and sines, each fp32 ``(1 or B, S, d/2)``."""


def rope_table(rope: Rope, width: int, batch: Batch) -> Table:
    """Table for heads of ``width`` values, of those that turn (arXiv 2104.09864 eq. 15)."""
    positions_BS = batch.places.unsqueeze(0) if batch.positions_BS is None else batch.positions_BS
    angles = positions_BS.float().unsqueeze(-1) * frequencies(rope, rope.turning(width), positions_BS.device)
    return angles.cos() * rope.length_factor, angles.sin() * rope.length_factor


def rotate(x_BSHd: Tensor, table: Table, rope: Rope) -> Tensor:
    """Rotate each pair of the values that turn by the angle of its position; p pairs come out as (i, i + p)."""
    return kernels.rotate(x_BSHd, *table, neighbours=rope.pairs == "neighbours")


def frequencies(rope: Rope, width: int, device: torch.device) -> Tensor:
    """Angle by which each pair turns from one position to the next, fp32 ``(width/2)``."""
    first_of_pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    plain: Tensor = 1.0 / rope.theta ** (first_of_pairs / width)
    if rope.kind == "linear":
        plain /= rope.option("factor")
    elif rope.kind == "llama3":
        return _llama3(rope, plain)
    elif rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend between.

    ``low_freq_factor`` and ``high_freq_factor`` are turns of a pair over the trained length.
    """
    low = rope.option("low_freq_factor")
    high = rope.option("high_freq_factor")
    turns = rope.option("trained_positions") * plain / (2 * math.pi)
    kept_share: Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    blended: Tensor = (1 - kept_share) * plain / rope.option("factor") + kept_share * plain
    return blended


def _yarn(rope: Rope, plain: Tensor) -> Tensor:
    """Divide frequencies by the factor from ``beta_slow`` turns of the trained length on, keep them from ``beta_fast``.

    Between, they are blended along the pair's number (arXiv 2309.00071 section 3.2).
    """
    num_pairs = len(plain)

    def pair_that_turns(times: float) -> float:
        """Number of the pair, as a fraction, that turns so often in the trained length."""
        length = rope.option("trained_positions") / (2 * math.pi * times)
        return num_pairs * math.log(length) / math.log(rope.theta)

    first = pair_that_turns(rope.option("beta_fast"))
    last = pair_that_turns(rope.option("beta_slow"))
    if rope.option("truncate"):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * num_pairs - 1)
    span = 0.001 if last == first else last - first
    pairs = torch.arange(num_pairs, device=plain.device, dtype=torch.float32)
    divided_share = ((pairs - first) / span).clamp(0.0, 1.0)
    blended: Tensor = divided_share * plain / rope.option("factor") + (1 - divided_share) * plain
    return blended
