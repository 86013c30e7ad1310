"""What a rank stores of a tensor that may be shared out, and all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shared_out(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this rank stores only a piece of a tensor."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return what this rank stores of a tensor that may be shared out."""
    return tensor.to_local() if is_shared_out(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be shared out. Collective over its ranks."""
    return tensor.full_tensor() if is_shared_out(tensor) else tensor


@contextmanager
def all_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield room for all of a tensor that may be shared out; what is written there is stored, without any exchange."""
    if not is_shared_out(tensor):
        yield tensor
        return
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    yield values
    for dim, placement in enumerate(tensor.placements):
        axis = getattr(placement, "dim", None)  # a copy has none
        if axis is not None:
            index = tensor.device_mesh.get_local_rank(dim)
            pieces = values.chunk(tensor.device_mesh.size(dim), axis)
            values = pieces[index] if index < len(pieces) else values.narrow(axis, 0, 0)
    tensor.to_local().copy_(values)
