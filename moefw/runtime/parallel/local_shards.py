"""The piece that a rank stores of a tensor that may be sharded, and the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from moefw.core.contracts import Adapter, Layout, StackedAdapter
from moefw.core.records import Side
from moefw.runtime.compute.coded_share import CodedShare
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.compute.primary_weights import Master

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shared_out(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ``tensor`` is sharded, so that this rank may store only a piece."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Piece that this rank stores of a tensor that may be sharded."""
    if not is_shared_out(tensor):
        return tensor
    own = tensor.to_local()
    return own.stored if isinstance(own, Master) else own


def num_stored(tensor: Tensor) -> int:
    """Number of the values of a tensor that may be sharded that this rank stores, perhaps as codes."""
    own = local(tensor)
    return own.num_values if isinstance(own, CodedShare) else own.numel()


def is_held_as_codes(tensor: Tensor) -> bool:
    """Whether a tensor that may be sharded is codes, without values."""
    return isinstance(local(tensor), CodedWeight | CodedShare)


def whole(tensor: Tensor) -> Tensor:
    """Whole of a tensor that may be sharded. Collective over its ranks."""
    if not is_shared_out(tensor):
        return tensor
    own = local(tensor)
    if isinstance(own, CodedShare):
        return own.gathered(tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1))
    return tensor.full_tensor()


@contextmanager
def all_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a buffer for the whole of a tensor that may be sharded. Its values are stored at exit, without exchange.

    The buffer of a weight that is held as codes is one, too.
    """
    if not is_shared_out(tensor):
        yield tensor
        return
    own = local(tensor)
    if isinstance(own, CodedShare):
        weight = CodedWeight.empty(tensor.shape, own.sharing.format, own.device)
        yield weight
        own.store(weight)
        return
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    yield values
    tensor.to_local().copy_(stored(tensor, values))


def stored(tensor: Tensor, values: Tensor) -> Tensor:
    """Piece of ``values``, which have the shape of the whole tensor, that this rank stores."""
    if not is_shared_out(tensor):
        return values
    for dim, placement in enumerate(tensor.placements):
        axis = getattr(placement, "dim", None)  # a replicate placement has none
        if axis is not None:
            index = tensor.device_mesh.get_local_rank(dim)
            pieces = values.chunk(tensor.device_mesh.size(dim), axis)
            values = pieces[index] if index < len(pieces) else values.narrow(axis, 0, 0)
    return values


def shared_out_like(tensor: Tensor, values: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """``values``, for the piece of ``tensor`` that this rank stores, as a tensor with the same sharding.

    The values are not copied, and may be on another device. ``shape``: that of the whole, if it is another one than
    that of ``tensor``, as of a tensor with one value for each block of columns.
    """
    if not is_shared_out(tensor):
        return values
    from torch.distributed.tensor import DTensor

    spec = tensor._spec
    meta = spec.tensor_meta
    assert meta is not None
    meta = meta._replace(dtype=values.dtype)
    if shape is not None:
        like = torch.empty(tuple(shape), device="meta")
        meta = meta._replace(shape=like.shape, stride=like.stride())
    return DTensor(values, replace(spec, tensor_meta=meta), requires_grad=False)


def sharded_sides(layout: Layout) -> frozenset[Side]:
    """Sides of a model whose parameters a layout shards."""
    sides: tuple[Side, Side] = ("dense", "experts")
    return frozenset(side for side in sides if layout.plan.num_shards(side) > 1)


def may_be_codes(owner: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a parameter may be gathered as codes of a recipe: a matrix that trains, and not one of an adapter.

    Vectors stay as they are, and so do frozen matrices, which have no master. Factors of adapters are small.
    """
    return parameter.ndim > 1 and parameter.requires_grad and not isinstance(owner, Adapter | StackedAdapter)
