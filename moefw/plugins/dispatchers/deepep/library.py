"""Rank-deduplicated dispatch through the DeepEP library. A wire says how received rows become rows of experts.

Data known only after the dispatch (the library's handle, the expansion of rows) is kept in the movement and its handle.
Shapes: legend in :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

import moefw
from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec, Dispatcher
from moefw.core.stages import ExpertBatch, Pending, Routing
from moefw.plugins.dispatchers.deepep.limits import Shape
from moefw.plugins.dispatchers.deepep.packed import PaddedRows
from moefw.plugins.dispatchers.deepep.probe import open_wire
from moefw.plugins.dispatchers.deepep.wire import Choices, Expansion, Moved, Wire
from moefw.runtime.communication.movement import finish, start
from moefw_kernels.devices import on_host


def build(
    experts: ExpertGroup,
    context: moefw.BuildContext,
    *,
    codec: Codec | None = None,
    max_tokens: int | None = None,
    grouped: bool = False,
) -> Dispatcher[Any, Any]:
    """Dispatcher of this process over the buffer that all its layers share.

    ``grouped``: the library groups rows by expert, in its own order.

    Raises PlanError where the library is missing or does not support the layer.
    """
    row_alignment = context.facts["row_alignment"]
    shape = Shape.of(context.site.dims, ep=experts.ep, etp=experts.etp)
    key = ("deep_ep", tuple(dist.get_process_group_ranks(experts.group)), shape, max_tokens, grouped)
    wire = context.shared(key, lambda: open_wire(experts, shape, max_tokens=max_tokens, grouped=grouped))
    padded = None if codec is None else PaddedRows(codec)
    return LibraryDeepEP(experts, wire, row_alignment=row_alignment, key_columns=shape.model_dim, codec=padded)


@dataclass(frozen=True, slots=True, eq=False)
class _Dispatched:
    """Result of a dispatch: the library's handle, and how received rows are expanded."""

    handle: Any
    expansion: Expansion


@dataclass(slots=True, eq=False)
class _Trip:
    """One dispatch: the launch stores the library's results for the launch of its dual and for the finish."""

    handle: Any = None
    expansion: Callable[[], Expansion] | None = None


@final
class LibraryDeepEP(Dispatcher[Choices, _Dispatched]):
    """``dispatch`` and ``combine`` of a DeepEP buffer, each the dual of the other along one handle.

    Keys travel as rows of the model's width: 16 bytes are too few for ``Buffer``, and ``ElasticBuffer`` has one width.
    """

    def __init__(
        self, experts: ExpertGroup, wire: Wire, *, row_alignment: int, key_columns: int, codec: Codec | None = None
    ) -> None:
        self.experts = experts
        self.wire = wire
        self.row_alignment = row_alignment
        self.key_columns = key_columns
        self.codec = codec

    def plan(
        self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> Choices:
        """Number the experts as the library does. Its dispatch exchanges the counts: ``counts`` is unused."""
        experts = self.experts
        ids_TK = routing.expert_ids_TK
        capacity = 0
        if routing.capacity is not None:
            capacity = self._sum_over_ranks(routing.capacity, ids_TK.device)
        return Choices(
            # (T, K) -> (T, K * etp): each part of an expert is an expert to the library
            ids_TK=experts.parts(ids_TK).to(self.wire.ids_dtype).contiguous(),
            local_experts=experts.local_experts,
            alignment=self.row_alignment,
            capacity=capacity,
        )

    def _sum_over_ranks(self, capacity: int, device: torch.device) -> int:
        """Sum of the ranks' capacities. The host waits."""
        on_device = torch.full((), capacity, device=device)
        dist.all_reduce(on_device, group=self.experts.metadata_group)
        total: int = on_host(on_device)[0]
        return total

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: Choices) -> Pending[_Trip]:
        """Send each token once to each rank. The host waits for the number of rows; the stream does not wait."""
        trip = _Trip()

        def send(sent: Sequence[Tensor]) -> Moved:
            # (T, D) and (T, K) -> a row for each (token, rank): (N, D) and (N, K), or as the library groups them
            arrived = self.wire.send(sent[0], sent[1], plan)
            trip.handle = arrived.handle
            trip.expansion = arrived.expansion
            return [arrived.rows, arrived.weights], [arrived.work]

        def send_back(grads: Sequence[Tensor]) -> Moved:
            return self.wire.send_back(grads, trip.handle)

        return start(self._sent(x_TD, weights_TK), forward=send, dual=send_back, codec=self.codec, detail=trip)

    def start_redispatch(self, x_TD: Tensor, weights_TK: Tensor, handle: _Dispatched) -> Pending[_Trip]:
        """Send along the handle. No ids or counts are sent, and the host does not wait."""
        return start(
            self._sent(x_TD, weights_TK),
            forward=partial(self.wire.send_again, handle=handle.handle),
            dual=partial(self.wire.send_back, handle=handle.handle),
            codec=self.codec,
            detail=_Trip(handle.handle, expansion=lambda: handle.expansion),
        )

    def _sent(self, x_TD: Tensor, weights_TK: Tensor) -> list[Tensor]:
        """Tokens and weights as the library takes them: a weight for each part of an expert, ``(T, K * etp)``.

        Raises ContractError for tokens that are not bf16.
        """
        if x_TD.dtype is not torch.bfloat16:
            raise moefw.ContractError(f"DeepEP moves bf16 rows; these are {x_TD.dtype}.", "Use precision: {use: bf16}.")
        if self.experts.etp > 1:
            weights_TK = weights_TK.repeat_interleave(self.experts.etp, 1)
        return [x_TD, weights_TK]

    def finish_dispatch(self, pending: Pending[_Trip]) -> tuple[ExpertBatch, _Dispatched]:
        """Expand the received rows to one row per (row, local expert), unless the library has done so."""
        trip = pending.detail
        rows, weights = finish(pending)
        assert trip.expansion is not None
        expansion = trip.expansion()
        handle = _Dispatched(trip.handle, expansion)
        # -> (R, D) and (R), grouped by expert
        return ExpertBatch.of(expansion.expand(rows, weights), expansion.groups), handle

    def start_combine(self, rows_RD: Tensor, handle: _Dispatched) -> Pending[None]:
        """Add up each token over its local experts, and send back one row per (token, rank)."""
        # (R, D) -> (N, D), which the library adds up to (T, D)
        return start(
            [handle.expansion.reduce(rows_RD)],
            forward=partial(self.wire.send_back, handle=handle.handle),
            dual=partial(self.wire.send_again, handle=handle.handle),
        )

    def finish_combine(self, pending: Pending[None]) -> Tensor:
        """Wait. The library has added up each token over its ranks."""
        (out_TD,) = finish(pending)
        return out_TD
