"""Optimizer states in bf16: widened for an update, bucket by bucket, and rounded after it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, final

import torch
from torch import Tensor

from moefw.runtime.memory.optimizer_states import OptimizerPolicy, OptimizerStates, StatePart, buckets, numbers
from moefw_kernels.random import stream

ELEMENTS: Final = 1 << 24
"""Number of elements that are in fp32 at a time: 64 MiB per state."""
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

    The probability is the fraction of the way to that neighbour. Values that bf16 represents exactly, and values that
    are not finite, do not change.
    """
    carried = (x.view(torch.int32) + (bits & _DROPPED).to(torch.int32)) & ~_DROPPED
    return torch.where(x.isfinite(), carried.view(torch.float32), x).to(torch.bfloat16)


@final
class BF16Policy(OptimizerPolicy):
    """Rounds states at random, or to nearest."""

    def __init__(self, *, stochastic: bool) -> None:
        self.stochastic = stochastic

    def treat(self, states: OptimizerStates) -> OptimizerStates:
        """Return ``states`` in bf16."""
        return BF16States(states, stochastic=self.stochastic)


@final
class BF16States(OptimizerStates):
    """``inner`` states, rounded."""

    dtype = torch.bfloat16

    def __init__(self, inner: OptimizerStates, *, stochastic: bool, elements: int = ELEMENTS) -> None:
        self.inner, self.stochastic, self.elements = inner, stochastic, elements

    def room(self, parameter: Tensor) -> Tensor:
        """Return zeros in bf16."""
        return self.inner.room(parameter).to(self.dtype)

    def update(self, parts: Sequence[StatePart]) -> None:
        """Update in fp32, bucket by bucket, and round the new states."""
        for bucket in buckets(parts, self.elements):
            wide = [replace(part, states={key: state.float() for key, state in part.states.items()}) for part in bucket]
            self.inner.update(wide)
            for part, new in zip(bucket, wide, strict=True):
                self._store(part, new)

    def _store(self, part: StatePart, new: StatePart) -> None:
        bits = None
        for number, (key, state) in enumerate(part.states.items()):
            if not self.stochastic:
                state.copy_(new.states[key])
                continue
            bits = draws(part, number // WORDS) if bits is None or number % WORDS == 0 else bits >> DROPPED_BITS
            state.copy_(rounded(new.states[key], bits))
