"""Stochastic rounding to bf16: up with a probability equal to the fraction of the way to the upper neighbour."""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import Tensor

from moefw.runtime.memory.optimizer_states import StatePart, numbers
from moefw_kernels.random import stream

DROPPED_BITS: Final = 16
"""Number of bits by which fp32 is longer than bf16."""
_DROPPED: Final = (1 << DROPPED_BITS) - 1
WORDS: Final = 64 // DROPPED_BITS
"""Number of states that are rounded with the 64 bits drawn for an element."""


def draws(part: StatePart, number: int) -> Tensor:
    """Return 64 random bits for each element of a part, int64, in draw ``number``.

    They depend on the seed, the step, the draw, and the element's place in the named tensor, which no layout changes.
    """
    bits = torch.zeros(part.parameter.shape, dtype=torch.int64, device=part.parameter.device)
    for origin in part.origins:
        key = hashlib.sha256(f"{part.seed}:{part.step}:{number}:{origin.name}".encode()).digest()
        bits[origin.box] = stream(int.from_bytes(key[:8], "big"), numbers(origin, bits.device))
    return bits


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Return fp32 ``x`` in bf16, rounded up in magnitude where the low 16 of the random ``bits`` (int64) carry.

    Values that bf16 represents exactly, and values that are not finite, do not change.
    """
    carried = (x.view(torch.int32) + (bits & _DROPPED).to(torch.int32)) & ~_DROPPED
    return torch.where(x.isfinite(), carried.view(torch.float32), x).to(torch.bfloat16)
