"""Optimizer states in bf16: widened for an update, bucket by bucket, and rounded after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from moefw.plugins.memory.optimizer_bf16.rounding import DROPPED_BITS, WORDS, draws, rounded
from moefw.runtime.memory.optimizer_states import OptimizerPolicy, OptimizerStates, StatePart, buckets

ELEMENTS = 1 << 24
"""Number of elements that are in fp32 at a time: 64 MiB per state."""


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
