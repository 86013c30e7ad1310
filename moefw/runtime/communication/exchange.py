"""All-to-all over a group: blocking for metadata, a movement for rows, whose dual is the reverse all-to-all."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec
from moefw.core.stages import Pending
from moefw.runtime.communication.movement import D, Launch, Permutation, Work, start, stay

Splits = Sequence[int]
"""Rows to or from each rank of a group."""


def exchange(
    tensors: Sequence[Tensor],
    sent: Splits,
    received: Splits,
    group: ProcessGroup | None,
    *,
    codec: Codec | None = None,
    rows: Permutation | None = None,
    detail: D = None,  # type: ignore[assignment]
) -> Pending[D]:
    """Start sending ``sent[rank]`` rows of each tensor, stored in order of rank, to each rank. Differentiable.

    ``codec`` packs the first tensor. With ``rows``, that tensor is tokens, from which the rows are gathered.
    """
    if group is None:
        return stay(tensors, codec=codec, rows=rows, detail=detail)
    forward = _all_to_all(sent, received, group)
    dual = _all_to_all(received, sent, group)
    return start(tensors, forward=forward, dual=dual, codec=codec, rows=rows, detail=detail)


def exchange_now(rows: Tensor, sent: Splits, received: Splits, group: ProcessGroup | None) -> Tensor:
    """Rows that the ranks sent to this rank. Not differentiable: for metadata."""
    if group is None:
        return rows
    (buffer,), (work,) = _all_to_all(sent, received, group)([rows])
    work.wait()
    return buffer


def by_rank(counts_E: Tensor, experts: ExpertGroup) -> Tensor:
    """Numbers of rows for the experts of each rank, ``(P, e)``, given those for all experts.

    Every rank that holds a part of an expert gets all of its rows.
    """
    return counts_E.view(experts.ep, -1).repeat_interleave(experts.etp, 0)


def _all_to_all(sent: Splits, received: Splits, group: ProcessGroup) -> Launch:
    def launch(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Work]]:
        buffers = [tensor.new_empty(sum(received), *tensor.shape[1:]) for tensor in tensors]
        works = [
            dist.all_to_all_single(buffer, tensor, list(received), list(sent), group=group, async_op=True)
            for buffer, tensor in zip(buffers, tensors, strict=True)
        ]
        return buffers, works

    return launch
