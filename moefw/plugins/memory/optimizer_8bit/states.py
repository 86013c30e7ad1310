"""Optimizer states as 8-bit codes: decoded for an update, bucket by bucket, and encoded after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, final

import torch
from torch import Tensor

from moefw.core.errors import ContractError, Problem
from moefw.plugins.memory.optimizer_8bit.codes import decoded, encoded, table
from moefw.plugins.memory.optimizer_8bit.cuts import fix_of_cuts
from moefw.runtime.optimizer_states import OptimizerPolicy, OptimizerStates, Room, StatePart, buckets, draws
from moefw.runtime.parallel.boxes import Box, of_blocks

ELEMENTS: Final = 1 << 22
"""Number of elements that are in fp32 at a time: 16 MiB per state."""
STATE_BITS: Final = 32
"""Number of the 64 bits drawn for an element that one state takes."""
WORDS: Final = 64 // STATE_BITS
"""Number of states that are rounded with one draw."""
SCALE: Final = "_scale"
"""What the key of a state's scales ends in."""
MOST_LISTED: Final = 3
"""The most tensors that an error names."""


@final
class EightBitPolicy(OptimizerPolicy):
    """Rounds states to codes at random, or to nearest. ``block`` columns share a scale."""

    def __init__(self, *, stochastic: bool, block: int) -> None:
        self.stochastic = stochastic
        self.block = block

    def treat(self, states: OptimizerStates) -> OptimizerStates:
        """``states`` as codes."""
        return EightBitStates(states, stochastic=self.stochastic, block=self.block)


@final
class EightBitStates(OptimizerStates):
    """The states of ``inner``, those of matrices as codes with scales. ``elements`` of them are in fp32 at a time.

    States of vectors, such as norms and biases, stay as they are: they are few, and ranks may cut them anywhere.
    """

    dtype = torch.uint8

    def __init__(self, inner: OptimizerStates, *, stochastic: bool, block: int, elements: int = ELEMENTS) -> None:
        self.inner = inner
        self.stochastic = stochastic
        self.block = block
        self.elements = elements

    def room(self, parameter: Tensor) -> Tensor:
        """Nothing: codes have scales besides. Raises ContractError."""
        what = "optimizer-8bit stores a state as two tensors, and a policy around it asks for one."
        raise ContractError(what, "Let rooms() of that policy's states pass on those of the inner ones.")

    def rooms(self, key: str, parameter: Tensor, dims: int) -> dict[str, Room]:
        """Codes and scales of zeros; of vectors, what ``inner`` has."""
        if dims < 2:
            return self.inner.rooms(key, parameter, dims)
        codes = torch.zeros_like(parameter, dtype=self.dtype, requires_grad=False)
        scales = parameter.new_zeros(of_blocks(parameter.shape, self.block), dtype=torch.float32)
        return {key: Room(codes), key + SCALE: Room(scales, self.block)}

    def problems(self, boxes: Sequence[Box]) -> Sequence[Problem]:
        """Problem that names the matrices of which this rank stores parts of blocks."""
        cut = [box for box in boxes if len(box.whole) > 1 and box.cuts(self.block)]
        if not cut:
            return ()
        first = cut[0]
        columns = f"columns {first.columns.start} to {first.columns.stop} of the {first.whole[-1]}"
        others = f" and of {', '.join(box.name for box in cut[1:MOST_LISTED])}" if len(cut) > 1 else ""
        more = f" and {len(cut) - MOST_LISTED} more" if len(cut) > MOST_LISTED else ""
        what = (
            f"memory policy optimizer-8bit: blocks of {self.block} values of a row have one scale, and a rank stores "
            f"parts of blocks: {columns} of {first.name}{others}{more}."
        )
        places = [place for box in cut for place in (box.columns.start, box.columns.stop) if place != box.whole[-1]]
        return (Problem(what, fix_of_cuts(places)),)

    def values(self, part: StatePart) -> dict[str, Tensor]:
        """Values of the codes, and what ``inner`` has of other states."""
        return self.inner.values(self._decoded(part, _tables(part)))

    def update(self, parts: Sequence[StatePart]) -> None:
        """Update in fp32, bucket by bucket, and encode the new states."""
        if not parts:
            return
        tables = _tables(parts[0])
        for bucket in buckets(parts, self.elements):
            wide = [self._decoded(part, tables) for part in bucket]
            self.inner.update(wide)
            for part, new in zip(bucket, wide, strict=True):
                self._store(part, new, tables)

    def _decoded(self, part: StatePart, tables: _Tables) -> StatePart:
        """Part with the values of codes in place of codes and scales. Other states are those of ``part`` themselves."""
        states = {}
        for key, state in part.states.items():
            scales = part.states.get(key + SCALE)
            if scales is not None:
                states[key] = decoded(state, scales, tables[key in part.nonnegative], self.block)
            elif not _is_scale(part, key):
                states[key] = state
        return replace(part, states=states)

    def _store(self, part: StatePart, new: StatePart, tables: _Tables) -> None:
        """Copy the new states into those of ``part``, encoded. Each state of an element takes bits of its own."""
        bits = None
        for number, key in enumerate(new.states):
            if key + SCALE not in part.states:
                continue
            if self.stochastic:
                bits = draws(part, number // WORDS) if number % WORDS == 0 or bits is None else bits >> STATE_BITS
            nonnegative = key in part.nonnegative
            codes, scales = encoded(
                new.states[key], tables[nonnegative], self.block, signed=not nonnegative, bits_RC=bits
            )
            part.states[key].copy_(codes)
            part.states[key + SCALE].copy_(scales)


_Tables = Mapping[bool, Tensor]
"""Values of all codes, of states that are never below zero and of others."""


def _tables(part: StatePart) -> _Tables:
    """Tables on the device on which the states of a part are: made for an update, as they are small."""
    device = next(iter(part.states.values())).device
    return {nonnegative: table(signed=not nonnegative).to(device) for nonnegative in (True, False)}


def _is_scale(part: StatePart, key: str) -> bool:
    return key.endswith(SCALE) and key.removesuffix(SCALE) in part.states
