"""Which part of which named tensor a rank stores: the one answer, for whoever saves, loads, checks or rounds values.

Three coordinate systems meet here. A *parameter* is a tensor of the model, such as all experts of a rank stacked. A
rank may *store* only a part of it, as FSDP shards it. A *named* tensor has a canonical name that is the same in every
layout, such as one expert's matrix, of which this rank's parameter may hold a part, too. A :class:`Box` leads from
stored elements to the same elements of a named tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.core.records import Canonical, ParameterRole
from moefw.runtime.parallel.local_shards import stored


@frozen(eq=False)
class Box:
    """A box of what a rank stores of a parameter, and where it lies in the tensor with the canonical ``name``.

    ``whole``: the shape of the named tensor. ``corner``: the index in it of the first element of the box. ``slices``:
    of the stored tensor, one for each of its dimensions. ``dims``: for each dimension of the named tensor, that of the
    stored one; those that are left out have one element, such as the number of an expert.
    """

    name: str
    whole: tuple[int, ...]
    corner: tuple[int, ...]
    slices: tuple[slice, ...]
    dims: tuple[int, ...]

    def of(self, own: Tensor) -> Tensor:
        """Values of the box, with the dimensions of the named tensor: a view of ``own``.

        ``own``: what this rank stores of the parameter, or of a tensor of its shape, such as a moment.
        """
        index = [part if dim in self.dims else part.start for dim, part in enumerate(self.slices)]
        return own[tuple(index)]

    def rows(self, start: int, stop: int) -> Box | None:
        """Box in the stored rows from ``start`` to ``stop``, counted from ``start``; None if it has none of them."""
        rows = self.slices[0]
        begin = max(rows.start, start)
        end = min(rows.stop, stop)
        if begin >= end:
            return None
        corner = [first + (begin - rows.start) * (dim == 0) for first, dim in zip(self.corner, self.dims, strict=True)]
        return evolve(self, slices=(slice(begin - start, end - start), *self.slices[1:]), corner=tuple(corner))

    @property
    def columns(self) -> range:
        """Columns of the named tensor that the box has: places along its last dimension."""
        first = self.corner[-1]
        in_stored = self.slices[self.dims[-1]]
        return range(first, first + in_stored.stop - in_stored.start)

    def cuts(self, block: int) -> bool:
        """Whether the box begins or ends inside one of the blocks of ``block`` columns of the named tensor.

        The last block of a row may be shorter than the others. A box that begins inside a block of the stored tensor
        also cuts one.
        """
        columns = self.columns
        begins_inside = columns.start % block or self.slices[self.dims[-1]].start % block
        ends_inside = columns.stop % block and columns.stop < self.whole[-1]
        return bool(begins_inside or ends_inside)

    def of_blocks(self, block: int) -> Box:
        """This box in a tensor with one value for each block of ``block`` columns. It must cut none of them."""
        if block == 1:
            return self
        assert not self.cuts(block), "a block has one value, so it lies on one rank"
        dim = self.dims[-1]
        in_stored = self.slices[dim]
        slices = list(self.slices)
        slices[dim] = slice(num_blocks(in_stored.start, block), num_blocks(in_stored.stop, block))
        return evolve(
            self,
            whole=(*self.whole[:-1], num_blocks(self.whole[-1], block)),
            corner=(*self.corner[:-1], self.corner[-1] // block),
            slices=tuple(slices),
        )


def num_blocks(num_columns: int, block: int) -> int:
    """Number of blocks of ``block`` columns; the last one may be shorter."""
    return -(-num_columns // block)


def of_blocks(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """Shape of a tensor with one value for each block of ``block`` columns, given that of the tensor with columns."""
    if block == 1:  # also of a scalar, which has no columns
        return tuple(shape)
    return (*shape[:-1], num_blocks(shape[-1], block))


def boxes(pieces: Sequence[Canonical]) -> tuple[Box, ...]:
    """Boxes of the elements that this rank stores of the parameter with these pieces.

    Raises ContractError for a piece that is no box.
    """
    parameter = pieces[0].parameter
    # What this rank stores of a tensor of that shape, as a view on the meta device: its offset in memory, divided by
    # the strides of the whole tensor, is the index of its first element.
    view = stored(parameter, torch.empty(parameter.shape, device="meta"))
    offset = view.storage_offset()
    first: list[int] = []
    for stride in strides(parameter.shape):
        first.append(offset // stride)
        offset %= stride
    return boxes_within(pieces, first, view.shape)


def boxes_within(pieces: Sequence[Canonical], first: Sequence[int], stored_shape: Sequence[int]) -> tuple[Box, ...]:
    """Boxes of the pieces of a parameter of which a rank stores what begins at ``first`` and has ``stored_shape``.

    Raises ContractError for a piece that is no box.
    """
    of_pieces = [_box(piece, first, stored_shape) for piece in pieces]
    return tuple(box for box in of_pieces if box is not None)


def numbers(box: Box, device: torch.device) -> Tensor:
    """Number in the named tensor, in row-major order, of each element of a box: int64, one dimension for each slice."""
    num_dims = len(box.slices)
    named_strides = strides(box.whole)
    first = sum(index * stride for index, stride in zip(box.corner, named_strides, strict=True))
    numbers = torch.full((1,) * num_dims, first, device=device)
    for dim, stride in zip(box.dims, named_strides, strict=True):
        part = box.slices[dim]
        along_dim = [1] * num_dims
        along_dim[dim] = -1
        numbers = numbers + (torch.arange(part.stop - part.start, device=device) * stride).view(along_dim)
    return numbers


def strides(shape: Sequence[int]) -> list[int]:
    """Distances in memory between neighbours along each dimension, in row-major order."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _box(piece: Canonical, first: Sequence[int], stored_shape: Sequence[int]) -> Box | None:
    """Box of those elements of ``piece`` that this rank stores; None if it stores none of them.

    The rank stores a box of the parameter, of shape ``stored_shape``, whose first element has the index ``first``.
    """
    ranges = _ranges(piece)
    dims = _named_dims(piece)
    slices = []
    in_piece = []
    for dim, of_piece in enumerate(ranges):
        begin = max(of_piece.start, first[dim])
        end = min(of_piece.stop, first[dim] + stored_shape[dim])
        if begin >= end:
            return None
        slices.append(slice(begin - first[dim], end - first[dim]))
        in_piece.append(begin - of_piece.start)
    corner = [in_piece[dim] for dim in dims]
    if piece.shard is not None:
        corner[piece.shard.dim] += piece.shard.index * len(ranges[dims[piece.shard.dim]])
    return Box(name=piece.name, whole=whole_shape(piece), corner=tuple(corner), slices=tuple(slices), dims=dims)


def whole_shape(piece: Canonical) -> tuple[int, ...]:
    """Shape of the named tensor that a piece is, or is a part of."""
    ranges = _ranges(piece)
    sizes = tuple(len(ranges[dim]) for dim in _named_dims(piece))
    return sizes if piece.shard is None else piece.shard.whole(sizes)


def role(piece: Canonical) -> ParameterRole:
    """Role of a piece: what its owner says, or what the dimensions of the named tensor say."""
    if piece.role is not None:
        return piece.role
    return "matrix" if len(_named_dims(piece)) > 1 else "vector"


def _named_dims(piece: Canonical) -> tuple[int, ...]:
    """Dimensions of a parameter that the named tensor has, too.

    A number in the piece's index, such as that of an expert, removes one.
    """
    return tuple(dim for dim in range(piece.parameter.dim()) if not _is_number(piece, dim))


def _is_number(piece: Canonical, dim: int) -> bool:
    """Whether a piece's index is a number along a dimension of its parameter."""
    return dim < len(piece.index) and isinstance(piece.index[dim], int)


def _ranges(piece: Canonical) -> list[range]:
    """Elements of a piece along each dimension of its parameter."""
    return [_range(piece, dim, size) for dim, size in enumerate(piece.parameter.shape)]


def _range(piece: Canonical, dim: int, size: int) -> range:
    """Elements of a piece along a dimension of its parameter. Raises ContractError for any step but 1."""
    index = piece.index[dim] if dim < len(piece.index) else slice(None)
    if isinstance(index, int):
        return range(size)[index : index + 1 or None]
    elements = range(*index.indices(size))
    if elements.step != 1:
        problem = f"the piece {piece.name} of a parameter is every {elements.step}th element along dim {dim}."
        raise ContractError(problem, "Let Canonical.index be of numbers and slices without a step.")
    return elements
