"""All-gather and reduce-scatter of rows over a group: movements that are dual to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.contracts import Codec
from moefw.core.stages import Pending
from moefw.runtime.communication.movement import D, Launch, Work, start, stay

_RENAMED: Final = hasattr(dist, "all_gather_single")
"""Whether this is torch 2.13 or later, which renamed two collectives."""


# Both look their function up at each call, so that a trace may stand in its place.


def all_gather(output: Tensor, input: Tensor, *, group: ProcessGroup | None, async_op: bool = False) -> Any:
    """Gather ``input`` of every rank into ``output``, in order of rank. Returns a handle if ``async_op``."""
    gathers = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    return gathers(output, input, group=group, async_op=async_op)


def reduce_scatter(output: Tensor, input: Tensor, *, group: ProcessGroup | None, async_op: bool = False) -> Any:
    """Put this rank's part of the sum of ``input`` over all ranks into ``output``. Returns a handle if ``async_op``."""
    reduces = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    return reduces(output, input, group=group, async_op=async_op)


def gather(
    tensors: Sequence[Tensor],
    group: ProcessGroup | None,
    *,
    codec: Codec | None = None,
    detail: D = None,  # type: ignore[assignment]
) -> Pending[D]:
    """Start an all-gather of the rows of every rank, in order of rank. All have the same number. Differentiable.

    ``codec`` packs the first tensor.
    """
    if group is None:
        return stay(tensors, codec=codec, detail=detail)
    return start(tensors, forward=_gather(group), dual=_reduce(group), codec=codec, detail=detail)


def reduce(
    tensors: Sequence[Tensor],
    group: ProcessGroup | None,
    *,
    detail: D = None,  # type: ignore[assignment]
) -> Pending[D]:
    """Start a reduce-scatter of the tensors of all ranks: each gets its part of the summed rows. Differentiable."""
    if group is None:
        return stay(tensors, detail=detail)
    return start(tensors, forward=_reduce(group), dual=_gather(group), detail=detail)


def _gather(group: ProcessGroup) -> Launch:
    def launch(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Work]]:
        buffers = [tensor.new_empty(len(tensor) * group.size(), *tensor.shape[1:]) for tensor in tensors]
        pairs = zip(buffers, tensors, strict=True)
        return buffers, [all_gather(buffer, tensor, group=group, async_op=True) for buffer, tensor in pairs]

    return launch


def _reduce(group: ProcessGroup) -> Launch:
    def launch(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Work]]:
        buffers = [tensor.new_empty(len(tensor) // group.size(), *tensor.shape[1:]) for tensor in tensors]
        pairs = zip(buffers, tensors, strict=True)
        return buffers, [reduce_scatter(buffer, tensor, group=group, async_op=True) for buffer, tensor in pairs]

    return launch
