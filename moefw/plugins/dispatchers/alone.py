"""The dispatcher of a rank that holds all experts. Nothing is sent, so it is the same under every plugin.

Shapes: legend in :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from moefw.core.contracts import Codec, Dispatcher
from moefw.core.stages import ExpertBatch, Pending, Routing
from moefw.plugins.dispatchers.budget import Budget, check_tokens, reported
from moefw.runtime.communication.movement import stay
from moefw_kernels.permute import Arrival, arrange


@dataclass(slots=True, eq=False)
class _Metadata:
    """How tokens are expanded to rows, and what a budget reports."""

    arrival: Arrival
    stats: Mapping[str, Tensor]


@final
class AloneDispatcher(Dispatcher[_Metadata, _Metadata]):
    """Groups a rank's own rows by expert, and adds up each token's rows. A codec still rounds tokens."""

    def __init__(
        self,
        num_experts: int,
        *,
        row_alignment: int,
        counts_on_host: bool,
        codec: Codec | None = None,
        budget: Budget | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.num_experts = num_experts
        self.row_alignment = row_alignment
        self.counts_on_host = counts_on_host
        self.codec = codec
        self.budget = budget
        self.max_tokens = max_tokens

    def plan(
        self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> _Metadata:
        """Sort the choices. The host waits only if another part or an alignment of groups asks for it."""
        ids_TK = routing.expert_ids_TK
        num_tokens, k = ids_TK.shape
        budget = None if dropless else self.budget
        budget_rows = None
        if budget is not None:
            if self.max_tokens is not None:
                check_tokens(num_tokens, self.max_tokens)
            budget_rows = budget.rows((self.max_tokens or num_tokens) * k, self.row_alignment)
        arrival = arrange(
            ids_TK,
            self.num_experts,
            alignment=self.row_alignment,
            capacity=routing.capacity or 0,
            budget=budget_rows,
            counts=routing.counts_host if counts is None else counts[0],
            num_rows=routing.num_rows,
            counts_on_host=self.counts_on_host,
        )
        return _Metadata(arrival, reported(budget, arrival.left_out))

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: _Metadata) -> Pending[_Metadata]:
        """Tokens, rounded as if they were sent."""
        return stay([x_TD, weights_TK], codec=self.codec, detail=plan)

    def finish_dispatch(self, pending: Pending[_Metadata]) -> tuple[ExpertBatch, _Metadata]:
        """Expand each token to a row for each of its experts."""
        metadata = pending.detail
        # (T, D) and (T, K) -> (R, D) and (R), grouped by expert
        batch = ExpertBatch.of(metadata.arrival.expand(*pending.buffers), metadata.arrival, metadata.stats)
        return batch, metadata

    def start_combine(self, rows_RD: Tensor, handle: _Metadata) -> Pending[None]:
        """Add up each token's rows."""
        # (R, D) -> (T, D)
        return Pending(buffers=(handle.arrival.reduce(rows_RD),), detail=None)

    def finish_combine(self, pending: Pending[None]) -> Tensor:
        """Sums."""
        return pending.buffers[0]
