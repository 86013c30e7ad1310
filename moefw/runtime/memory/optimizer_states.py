"""Storage of optimizer states between steps, and their update, in groups of rows of parameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from moefw.core.contracts import MemoryPolicy
from moefw.core.errors import ContractError
from moefw.core.records import Canonical
from moefw.runtime.parallel.pieces import local, stored

CUT_ELEMENTS = 64
"""Rows are cut at multiples of this number of elements: CPU kernels round differently where a vector is not full."""


@frozen(eq=False)
class Origin:
    """A box of the piece of a parameter that a rank stores, and its place in the tensor with the canonical ``name``.

    Element ``i`` of the box is element ``first + sum(i * strides)`` of the named tensor, in row-major order.
    """

    name: str
    box: tuple[slice, ...]
    first: int
    strides: tuple[int, ...]


@dataclass(kw_only=True, eq=False, slots=True)
class StatePart:
    """Rows of a parameter that this rank stores, with the inputs of their update: plain tensors of one shape, fp32.

    ``states`` are by key, as stored or as a policy passes them on. An update changes them and ``parameter`` in place.
    ``group`` is the number of the parameter's group, ``step`` the number of earlier updates, ``seed`` that of the run.
    """

    group: int
    parameter: Tensor
    grad: Tensor
    states: dict[str, Tensor]
    origins: tuple[Origin, ...]
    step: int
    seed: int


class OptimizerStates(ABC):
    """Storage of an optimizer's states between steps, and their update. Memory policies wrap each other."""

    dtype: torch.dtype
    """Dtype in which the states are stored."""

    @abstractmethod
    def room(self, parameter: Tensor) -> Tensor:
        """Return zeros for a state of ``parameter``, this rank's piece: in storage form, with the same shape."""

    @abstractmethod
    def update(self, parts: Sequence[StatePart]) -> None:
        """Update parameters and states, given as stored. All of them are back in their storage on return.

        If a copy to a parameter is still in flight, the current stream waits for it.
        """


class OptimizerPolicy(MemoryPolicy):
    """Memory policy for the states of the optimizer between steps."""

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` as it is: the region holds no activations."""
        return function

    @abstractmethod
    def treat(self, states: OptimizerStates) -> OptimizerStates:
        """Return ``states``, stored and updated under this policy. Called once, before the first step."""


def numbers(origin: Origin, device: torch.device) -> Tensor:
    """Return the index in the named tensor of each element of the box: int64, with the shape of the box."""
    numbers = torch.full((1,) * len(origin.box), origin.first, device=device)
    for dim, (part, stride) in enumerate(zip(origin.box, origin.strides, strict=True)):
        steps = torch.arange(part.stop - part.start, device=device) * stride
        numbers = numbers + steps.view([-1 if each == dim else 1 for each in range(len(origin.box))])
    return numbers


def origins(pieces: Sequence[Canonical]) -> tuple[Origin, ...]:
    """Return the origins of the elements that this rank stores of the parameter with these pieces."""
    parameter = pieces[0].parameter
    shape, held = tuple(parameter.shape), stored(parameter, torch.empty(parameter.shape, device="meta"))
    place, corner = held.storage_offset(), []
    for stride in _row_by_row(shape):
        corner.append(place // stride)
        place %= stride
    found = (_origin(piece, shape, corner, held.shape) for piece in pieces)
    return tuple(origin for origin in found if origin is not None)


def _origin(piece: Canonical, shape: Sequence[int], corner: Sequence[int], held: Sequence[int]) -> Origin | None:
    """Return the origin of the elements of ``piece`` in the box of shape ``held`` at ``corner``; None without any."""
    ranges = [_range(piece, dim, size) for dim, size in enumerate(shape)]
    kept = [dim for dim in range(len(shape)) if not (dim < len(piece.index) and isinstance(piece.index[dim], int))]
    sizes = [len(ranges[dim]) for dim in kept]
    strides, first = dict.fromkeys(range(len(shape)), 0), 0
    whole = piece.shard.whole(sizes) if piece.shard else tuple(sizes)
    for number, (dim, stride) in enumerate(zip(kept, _row_by_row(whole), strict=True)):
        strides[dim] = stride
        if piece.shard is not None and piece.shard.dim == number:
            first += piece.shard.index * sizes[number] * stride
    box = []
    for dim, own in enumerate(ranges):
        begin, end = max(own.start, corner[dim]), min(own.stop, corner[dim] + held[dim])
        if begin >= end:
            return None
        box.append(slice(begin - corner[dim], end - corner[dim]))
        first += (begin - own.start) * strides[dim]
    return Origin(piece.name, tuple(box), first, tuple(strides.values()))


def _range(piece: Canonical, dim: int, size: int) -> range:
    part = piece.index[dim] if dim < len(piece.index) else slice(None)
    own = range(part, part + 1) if isinstance(part, int) else range(*part.indices(size))
    if own.step != 1:
        what = f"the piece {piece.name} of a parameter is every {own.step}th element along dim {dim}."
        raise ContractError(what, "Let Canonical.index be of numbers and slices without a step.")
    return own


def _row_by_row(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def rows_of(part: StatePart, start: int, stop: int) -> StatePart:
    """Return the rows from ``start`` to ``stop``."""
    if (start, stop) == (0, len(part.parameter)):
        return part
    cut = (_rows_of_box(origin, start, stop) for origin in part.origins)
    return replace(
        part,
        parameter=part.parameter[start:stop],
        grad=part.grad[start:stop],
        states={key: state[start:stop] for key, state in part.states.items()},
        origins=tuple(origin for origin in cut if origin is not None),
    )


def _rows_of_box(origin: Origin, start: int, stop: int) -> Origin | None:
    """Return the part of the box in the stored rows from ``start`` to ``stop``; None if it has none of them."""
    own = origin.box[0]
    begin, end = max(own.start, start), min(own.stop, stop)
    if begin >= end:
        return None
    box = (slice(begin - start, end - start), *origin.box[1:])
    return evolve(origin, box=box, first=origin.first + (begin - own.start) * origin.strides[0])


def buckets(parts: Sequence[StatePart], elements: int) -> Iterator[list[StatePart]]:
    """Yield the parts in order, cut between rows into buckets of at most ``elements``, or one smallest cut."""
    bucket: list[StatePart] = []
    left = elements
    for part in parts:
        rows, start = len(part.parameter), 0
        each = part.parameter.numel() // rows
        unit = CUT_ELEMENTS // math.gcd(CUT_ELEMENTS, each)
        while start < rows:
            count = rows - start if (rows - start) * each <= left else left // (unit * each) * unit
            if not count and bucket:
                yield bucket
                bucket, left = [], elements
                continue
            count = min(count or unit, rows - start)
            bucket.append(rows_of(part, start, start + count))
            start, left = start + count, max(0, left - count * each)
    if bucket:
        yield bucket


def local_rows(tensor: Tensor) -> Tensor:
    """Return the piece of a tensor that this rank stores, detached. A scalar is one row."""
    rows: Tensor = torch.atleast_1d(local(tensor.detach()))
    return rows
