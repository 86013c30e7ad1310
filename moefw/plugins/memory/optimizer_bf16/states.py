"""Optimizer states in bf16: widened for an update, bucket by bucket, and rounded after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, final

import torch
from torch import Tensor

from moefw.runtime.optimizer_states import OptimizerPolicy, OptimizerStates, StatePart, buckets, draws

ELEMENTS: Final = 1 << 24
"""Number of elements that are in fp32 at a time: 64 MiB per state."""
DROPPED_BITS: Final = 16
"""Number of bits by which fp32 is longer than bf16."""
_DROPPED: Final = (1 << DROPPED_BITS) - 1
"""Mask of these bits."""
WORDS: Final = 64 // DROPPED_BITS
"""Number of states that are rounded with the 64 bits drawn for an element."""


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Fp32 ``x`` in bf16, rounded at random by the low 16 of the ``bits`` (int64), without bias.

    The probability of the neighbour of larger magnitude is the fraction of the way to it. Values that bf16 represents
    exactly, and values that are not finite, do not change.
    """
    # bf16 is the upper half of fp32. Random bits added to the lower half carry into it as often as that half is large;
    # the carry runs into the exponent where it must. Infinity would become NaN, and so is left out.
    carried = (x.view(torch.int32) + (bits & _DROPPED).to(torch.int32)) & ~_DROPPED
    return torch.where(x.isfinite(), carried.view(torch.float32), x).to(torch.bfloat16)


@final
class BF16Policy(OptimizerPolicy):
    """Rounds states at random, or to nearest."""

    def __init__(self, *, stochastic: bool) -> None:
        self.stochastic = stochastic

    def treat(self, states: OptimizerStates) -> OptimizerStates:
        """``states`` in bf16."""
        return BF16States(states, stochastic=self.stochastic)


@final
class BF16States(OptimizerStates):
    """The states of ``inner`` in bf16. ``elements`` of them are in fp32 at a time."""

    dtype = torch.bfloat16

    def __init__(self, inner: OptimizerStates, *, stochastic: bool, elements: int = ELEMENTS) -> None:
        self.inner = inner
        self.stochastic = stochastic
        self.elements = elements

    def room(self, parameter: Tensor) -> Tensor:
        """Zeros in bf16."""
        return self.inner.room(parameter).to(self.dtype)

    def update(self, parts: Sequence[StatePart]) -> None:
        """Update in fp32, bucket by bucket, and round the new states."""
        for bucket in buckets(parts, self.elements):
            wide = [_widened(part) for part in bucket]
            self.inner.update(wide)
            for part, new in zip(bucket, wide, strict=True):
                self._store(part, new)

    def _store(self, part: StatePart, new: StatePart) -> None:
        """Copy the new states into those of ``part``, rounded. Each state of an element takes bits of its own."""
        if not self.stochastic:
            for key, state in part.states.items():
                state.copy_(new.states[key])
            return
        bits = None
        for number, (key, state) in enumerate(part.states.items()):
            # A draw has 64 bits: four states use 16 of them each.
            bits = draws(part, number // WORDS) if bits is None or number % WORDS == 0 else bits >> DROPPED_BITS
            state.copy_(rounded(new.states[key], bits))


def _widened(part: StatePart) -> StatePart:
    """Part with its states in fp32, as copies."""
    return replace(part, states={key: state.float() for key, state in part.states.items()})
