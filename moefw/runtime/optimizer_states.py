"""Storage of optimizer states between steps, and their update, in groups of rows of what a rank stores."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from moefw.core.contracts import MemoryPolicy
from moefw.core.errors import ContractError, PlanError, Problem
from moefw.runtime.parallel.boxes import Box, numbers, of_blocks
from moefw.runtime.parallel.local_shards import local, shared_out_like
from moefw_kernels.random import stream

CUT_ELEMENTS = 64
"""Rows are cut at multiples of this number of elements: CPU kernels round differently where a vector is not full.

So an update in buckets has the bits of an update of whole parameters.
"""


@dataclass(kw_only=True, eq=False, slots=True)
class StatePart:
    """Rows of a parameter that this rank stores, with the inputs of their update: plain tensors of one shape, fp32.

    ``states``: by key, in the dtype in which they are stored, or fp32 where a policy passes them on to the optimizer.
    An update changes them and ``parameter`` in place. ``boxes``: of the rows. ``group``: the number of the parameter's
    group, ``step`` that of earlier updates, ``seed`` that of the run. ``nonnegative``: the keys of states that are
    never below zero.

    A policy may store a state in several tensors (:meth:`OptimizerStates.rooms`): ``states`` then has all of them.
    """

    group: int
    parameter: Tensor
    grad: Tensor
    states: dict[str, Tensor]
    boxes: tuple[Box, ...]
    step: int
    seed: int
    nonnegative: frozenset[str] = frozenset()


@frozen(eq=False)
class Room:
    """A tensor in which a state is stored, or a part of what is stored of it.

    ``block``: the number of neighbouring columns of a row that share a value; 1: each element has one. The last block
    of a row may be shorter.
    """

    values: Tensor
    block: int = 1


class OptimizerStates(ABC):
    """Storage of an optimizer's states between steps, and their update. Memory policies wrap each other."""

    dtype: torch.dtype
    """Dtype in which the states are stored."""

    @abstractmethod
    def room(self, parameter: Tensor) -> Tensor:
        """Zeros for a state of ``parameter``, this rank's piece: in storage form, with the same shape."""

    def rooms(self, key: str, parameter: Tensor, dims: int) -> dict[str, Room]:
        """Zeros for the state ``key`` of ``parameter``, this rank's piece, by key: all tensors in which it is stored.

        One of them has the key of the state. ``dims``: the number of dimensions of the named tensors in ``parameter``,
        which may be a stack of them. The default is one tensor, :meth:`room`.
        """
        return {key: Room(self.room(parameter))}

    def problems(self, boxes: Sequence[Box]) -> Sequence[Problem]:
        """Reasons why the states of these boxes, all that this rank stores, cannot be stored so. Default: none."""
        return ()

    def values(self, part: StatePart) -> dict[str, Tensor]:
        """States of a part as the optimizer gets them, by key: fp32, of the parameter's shape, on any device.

        The default is the stored states, in fp32.
        """
        return {key: state.float() for key, state in part.states.items()}

    @abstractmethod
    def update(self, parts: Sequence[StatePart]) -> None:
        """Update parameters and states, given as stored. All of them are back in their storage on return.

        If a copy to a parameter is still in flight, the current stream waits for it.
        """


class OptimizerPolicy(MemoryPolicy):
    """Memory policy for the states of the optimizer between steps."""

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as it is: the region holds no activations."""
        return function

    @abstractmethod
    def treat(self, states: OptimizerStates) -> OptimizerStates:
        """``states``, stored and updated under this policy. Called once, before the first step."""


def rows_of(part: StatePart, start: int, stop: int) -> StatePart:
    """Rows from ``start`` to ``stop`` of a part, as views."""
    if (start, stop) == (0, len(part.parameter)):
        return part
    boxes_of_rows = [box.rows(start, stop) for box in part.boxes]
    return replace(
        part,
        parameter=part.parameter[start:stop],
        grad=part.grad[start:stop],
        states={key: state[start:stop] for key, state in part.states.items()},
        boxes=tuple(box for box in boxes_of_rows if box is not None),
    )


def num_elements(part: StatePart) -> int:
    """Number of elements of a part."""
    return part.parameter.numel()


def bytes_of_states(part: StatePart) -> int:
    """Bytes of all tensors in which the states of a part are stored."""
    return sum(state.nbytes for state in part.states.values())


def buckets(
    parts: Sequence[StatePart], limit: int, size_of: Callable[[StatePart], int] = num_elements
) -> Iterator[list[StatePart]]:
    """Yield the parts in order, cut between rows into buckets of at most the size ``limit``.

    ``size_of`` a part: all of its rows have the same. A bucket holds more if the smallest cut does: so few whole rows
    that their elements are a multiple of ``CUT_ELEMENTS``.
    """
    bucket: list[StatePart] = []
    free = limit
    for part in parts:
        num_rows = len(part.parameter)
        row_elements = part.parameter.numel() // num_rows
        row_size = size_of(part) // num_rows
        smallest_rows = CUT_ELEMENTS // math.gcd(CUT_ELEMENTS, row_elements)
        start = 0
        while start < num_rows:
            rows_left = num_rows - start
            count = rows_left
            if rows_left * row_size > free:
                count = free // (smallest_rows * row_size) * smallest_rows
            if count == 0 and bucket:
                yield bucket
                bucket = []
                free = limit
                continue
            count = min(count or smallest_rows, rows_left)
            bucket.append(rows_of(part, start, start + count))
            start += count
            free = max(0, free - count * row_size)
    if bucket:
        yield bucket


def require_room(states: OptimizerStates, boxes: Sequence[Box]) -> None:
    """Raise PlanError unless the states of these boxes, of what this rank stores, can be stored."""
    problems = states.problems(boxes)
    if problems:
        raise PlanError(problems)


def first_states(
    states: OptimizerStates, keys: Sequence[str], parameter: nn.Parameter, dims: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Zeros for all states of a parameter, sharded as it is, by key; and the columns of a block, of those with blocks.

    ``dims``: the number of dimensions of its named tensors. Raises ContractError if two of them have one key.
    """
    tensors: dict[str, Tensor] = {}
    blocks: dict[str, int] = {}
    for key in keys:
        for name, room in states.rooms(key, local(parameter.detach()), dims).items():
            if name in tensors:
                what = f"a memory policy stores the state {key} as {name}, which the optimizer has, too."
                raise ContractError(what, "Give the state of the optimizer another key.")
            shape = None if room.block == 1 else of_blocks(parameter.shape, room.block)
            tensors[name] = shared_out_like(parameter, room.values, shape)
            if room.block > 1:
                blocks[name] = room.block
    return tensors, blocks


def draws(part: StatePart, number: int) -> Tensor:
    """64 random bits for each element of a part, int64 of the parameter's shape, in draw ``number``.

    They depend on the seed, the step, the draw, and the element's place in the named tensor. So they are the same on
    every layout and on every copy of a parameter, and a resumed run draws them again.
    """
    bits = torch.zeros(part.parameter.shape, dtype=torch.int64, device=part.parameter.device)
    for box in part.boxes:
        # A key for each named tensor of which this parameter holds a box: two states, steps or tensors never share one.
        key = hashlib.sha256(f"{part.seed}:{part.step}:{number}:{box.name}".encode()).digest()
        bits[box.slices] = stream(int.from_bytes(key[:8], "big"), numbers(box, bits.device))
    return bits


def local_rows(tensor: Tensor) -> Tensor:
    """Part of a tensor that this rank stores, detached. A scalar is one row."""
    rows: Tensor = torch.atleast_1d(local(tensor.detach()))
    return rows
