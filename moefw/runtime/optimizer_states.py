"""Storage of optimizer states between steps, and their update, in groups of rows of what a rank stores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moefw.core.contracts import MemoryPolicy
from moefw.runtime.parallel.boxes import Box
from moefw.runtime.parallel.local_shards import local

CUT_ELEMENTS = 64
"""Rows are cut at multiples of this number of elements: CPU kernels round differently where a vector is not full.

So an update in buckets has the bits of an update of whole parameters.
"""


@dataclass(kw_only=True, eq=False, slots=True)
class StatePart:
    """Rows of a parameter that this rank stores, with the inputs of their update: plain tensors of one shape, fp32.

    ``states``: by key, in the dtype in which they are stored, or fp32 where a policy passes them on to the optimizer.
    An update changes them and ``parameter`` in place. ``boxes``: of the rows. ``group``: the number of the parameter's
    group, ``step`` that of earlier updates, ``seed`` that of the run.
    """

    group: int
    parameter: Tensor
    grad: Tensor
    states: dict[str, Tensor]
    boxes: tuple[Box, ...]
    step: int
    seed: int


class OptimizerStates(ABC):
    """Storage of an optimizer's states between steps, and their update. Memory policies wrap each other."""

    dtype: torch.dtype
    """Dtype in which the states are stored."""

    @abstractmethod
    def room(self, parameter: Tensor) -> Tensor:
        """Zeros for a state of ``parameter``, this rank's piece: in storage form, with the same shape."""

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


def buckets(parts: Sequence[StatePart], elements: int) -> Iterator[list[StatePart]]:
    """Yield the parts in order, cut between rows into buckets of at most ``elements`` elements.

    A bucket holds more if the smallest cut does: so few whole rows that their elements are a multiple of
    ``CUT_ELEMENTS``.
    """
    bucket: list[StatePart] = []
    free_elements = elements
    for part in parts:
        num_rows = len(part.parameter)
        row_elements = part.parameter.numel() // num_rows
        smallest_rows = CUT_ELEMENTS // math.gcd(CUT_ELEMENTS, row_elements)
        start = 0
        while start < num_rows:
            rows_left = num_rows - start
            if rows_left * row_elements <= free_elements:
                count = rows_left
            else:
                count = free_elements // (smallest_rows * row_elements) * smallest_rows
            if count == 0 and bucket:
                yield bucket
                bucket = []
                free_elements = elements
                continue
            count = min(count or smallest_rows, rows_left)
            bucket.append(rows_of(part, start, start + count))
            start += count
            free_elements = max(0, free_elements - count * row_elements)
    if bucket:
        yield bucket


def local_rows(tensor: Tensor) -> Tensor:
    """Part of a tensor that this rank stores, detached. A scalar is one row."""
    rows: Tensor = torch.atleast_1d(local(tensor.detach()))
    return rows
