"""Storage of optimizer states between steps, and their update, in groups of rows of parameters.

Three coordinate systems meet here. A *parameter* is a tensor of the model, such as all experts of a rank stacked. This
rank may *store* only a box of it, as FSDP shards it: its rows are what an update gets. A *named* tensor has a canonical
name that is the same in every layout, such as one expert's matrix, of which this rank's parameter may hold a part, too.
An :class:`Origin` leads from stored elements to the numbers of the same elements in named tensors, by which random
draws do not depend on the layout.
"""

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
from moefw.runtime.parallel.local_shards import local, stored

CUT_ELEMENTS = 64
"""Rows are cut at multiples of this number of elements: CPU kernels round differently where a vector is not full.

So an update in buckets has the bits of an update of whole parameters.
"""


@frozen(eq=False)
class Origin:
    """A box of what a rank stores of a parameter, and its place in the tensor with the canonical ``name``.

    ``box``: a slice of the stored tensor for each of its dimensions. The element at index ``i`` of the box, counted
    from its corner, has the number ``first + sum(i * strides)`` in the named tensor, in row-major order.
    """

    name: str
    box: tuple[slice, ...]
    first: int
    strides: tuple[int, ...]


@dataclass(kw_only=True, eq=False, slots=True)
class StatePart:
    """Rows of a parameter that this rank stores, with the inputs of their update: plain tensors of one shape, fp32.

    ``states``: by key, in the dtype in which they are stored, or fp32 where a policy passes them on to the optimizer.
    An update changes them and ``parameter`` in place. ``origins``: of the rows. the number of the parameter's
    group, ``step`` the number of earlier updates, ``seed`` that of the run.
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


def numbers(origin: Origin, device: torch.device) -> Tensor:
    """Number in the named tensor of each element of the box: int64, with the shape of the box."""
    num_dims = len(origin.box)
    numbers = torch.full((1,) * num_dims, origin.first, device=device)
    for dim, (part, stride) in enumerate(zip(origin.box, origin.strides, strict=True)):
        steps = torch.arange(part.stop - part.start, device=device) * stride
        along_dim = [1] * num_dims
        along_dim[dim] = -1
        numbers = numbers + steps.view(along_dim)
    return numbers


def origins(pieces: Sequence[Canonical]) -> tuple[Origin, ...]:
    """Origins of the elements that this rank stores of the parameter with these pieces."""
    parameter = pieces[0].parameter
    shape = tuple(parameter.shape)
    # What this rank stores of a tensor of that shape, as a view on the meta device: its offset in memory, divided by
    # the strides of the whole tensor, is the index of its first element, the corner.
    view = stored(parameter, torch.empty(parameter.shape, device="meta"))
    offset = view.storage_offset()
    corner: list[int] = []
    for stride in _row_major_strides(shape):
        corner.append(offset // stride)
        offset %= stride
    of_pieces = [_origin(piece, shape, corner, view.shape) for piece in pieces]
    return tuple(origin for origin in of_pieces if origin is not None)


def _origin(
    piece: Canonical, shape: Sequence[int], corner: Sequence[int], stored_shape: Sequence[int]
) -> Origin | None:
    """Origin of those elements of ``piece`` that this rank stores; None if it stores none of them.

    ``shape``: of the parameter. The rank stores a box of it of shape ``stored_shape``, whose first element is at
    ``corner``.
    """
    ranges = [_range(piece, dim, size) for dim, size in enumerate(shape)]
    # A number in the piece's index, such as that of an expert, removes a dimension: the named tensor has only the rest.
    named_dims = [dim for dim in range(len(shape)) if not _is_number(piece, dim)]
    piece_sizes = [len(ranges[dim]) for dim in named_dims]
    named_sizes = tuple(piece_sizes) if piece.shard is None else piece.shard.whole(piece_sizes)
    strides = dict.fromkeys(range(len(shape)), 0)  # 0 where a dimension is removed
    first = 0
    for named_dim, (dim, stride) in enumerate(zip(named_dims, _row_major_strides(named_sizes), strict=True)):
        strides[dim] = stride
        if piece.shard is not None and piece.shard.dim == named_dim:
            first += piece.shard.index * piece_sizes[named_dim] * stride  # of the piece in the named tensor
    box = []
    for dim, of_piece in enumerate(ranges):
        begin = max(of_piece.start, corner[dim])
        end = min(of_piece.stop, corner[dim] + stored_shape[dim])
        if begin >= end:
            return None
        box.append(slice(begin - corner[dim], end - corner[dim]))
        first += (begin - of_piece.start) * strides[dim]  # of the box in the piece
    return Origin(name=piece.name, box=tuple(box), first=first, strides=tuple(strides.values()))


def _is_number(piece: Canonical, dim: int) -> bool:
    """Whether a piece's index is a number along a dimension of its parameter."""
    return dim < len(piece.index) and isinstance(piece.index[dim], int)


def _range(piece: Canonical, dim: int, size: int) -> range:
    """Elements of a piece along a dimension of its parameter. Raises ContractError for any step but 1."""
    index = piece.index[dim] if dim < len(piece.index) else slice(None)
    if isinstance(index, int):
        return range(index, index + 1)
    elements = range(*index.indices(size))
    if elements.step != 1:
        problem = f"the piece {piece.name} of a parameter is every {elements.step}th element along dim {dim}."
        raise ContractError(problem, "Let Canonical.index be of numbers and slices without a step.")
    return elements


def _row_major_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def rows_of(part: StatePart, start: int, stop: int) -> StatePart:
    """Rows from ``start`` to ``stop`` of a part, as views."""
    if (start, stop) == (0, len(part.parameter)):
        return part
    origins_of_rows = [_rows_of_box(origin, start, stop) for origin in part.origins]
    return replace(
        part,
        parameter=part.parameter[start:stop],
        grad=part.grad[start:stop],
        states={key: state[start:stop] for key, state in part.states.items()},
        origins=tuple(origin for origin in origins_of_rows if origin is not None),
    )


def _rows_of_box(origin: Origin, start: int, stop: int) -> Origin | None:
    """Part of the box in the stored rows from ``start`` to ``stop``; None if it has none of them."""
    rows = origin.box[0]
    begin = max(rows.start, start)
    end = min(rows.stop, stop)
    if begin >= end:
        return None
    box = (slice(begin - start, end - start), *origin.box[1:])
    return evolve(origin, box=box, first=origin.first + (begin - rows.start) * origin.strides[0])


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
