"""All-to-all dispatch: sort rows by expert, send each rank its share, sort by (expert, source rank, token) there.

Shapes: legend in :mod:`moefw.core.stages`; ``P`` expert-parallel ranks, ``N`` rows sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.contracts import Dispatcher
from moefw.core.movement import Launch, Pending, Work, finish, start, stay
from moefw.core.stages import DispatchPlan, ExpertBatch, Receipt, Routing
from moefw_kernels.permute import Groups, Slots, gather, gather_sum, group_chunks, sort_slots

Splits = tuple[int, ...]
"""Rows to or from each rank."""
Counts = Sequence[Sequence[int]]
"""Rows by rank and expert."""


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """The metadata of one movement: rows sent, in order (expert, token), and how received rows are regrouped."""

    slots: Slots
    sent: Splits
    received: Splits
    groups: Groups


@final
class AllToAllDispatcher(Dispatcher):
    """One all-to-all of rows and one of weights each way; ``plan`` exchanges e counts per pair of ranks."""

    def __init__(
        self, group: ProcessGroup | None, *, num_ranks: int, rank: int, num_experts: int, row_alignment: int
    ) -> None:
        self.group, self.num_ranks, self.rank = group, num_ranks, rank
        self.num_experts, self.row_alignment = num_experts, row_alignment

    def plan(self, routing: Routing, *, counts: Counts | None = None) -> DispatchPlan:
        """Sort the choices and exchange how many rows each rank sends for each expert."""
        slots = sort_slots(routing.expert_ids_TK, self.num_experts)
        sent, received = self._exchange_counts(slots.counts) if counts is None else self._known(counts)
        groups = group_chunks(received, self.row_alignment, slots.slot_R.device)
        splits = ((), ()) if self.group is None else (tuple(map(sum, sent)), tuple(map(sum, received)))
        return DispatchPlan(detail=_Way(slots, *splits, groups))

    def _exchange_counts(self, counts: Tensor) -> tuple[Counts, Counts]:
        """Return the rows for each (rank, local expert), sent and received."""
        if self.group is None:
            alone = [counts.tolist()]
            return alone, alone
        sent_Pe = counts.view(self.num_ranks, -1)
        received_Pe = torch.empty_like(sent_Pe)
        dist.all_to_all_single(received_Pe, sent_Pe, group=self.group)
        sent, received = torch.stack([sent_Pe, received_Pe]).tolist()
        return sent, received

    def _known(self, counts: Counts) -> tuple[Counts, Counts]:
        local = self.num_experts // self.num_ranks
        mine = slice(self.rank * local, (self.rank + 1) * local)
        sent = [counts[self.rank][first : first + local] for first in range(0, self.num_experts, local)]
        return sent, [of_rank[mine] for of_rank in counts]

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: DispatchPlan) -> Pending:
        """Send one row a (token, expert), and its weight."""
        way: _Way = plan.detail
        rows_ND = gather(x_TD, way.slots.rows)
        weights_N = weights_TK.flatten().index_select(0, way.slots.slot_R)
        return self._move([rows_ND, weights_N], way.sent, way.received, detail=plan)

    def start_redispatch(self, x_TD: Tensor, weights_TK: Tensor, receipt: Receipt) -> Pending:
        """Send again along the same way."""
        return self.start_dispatch(x_TD, weights_TK, receipt.plan)

    def finish_dispatch(self, pending: Pending) -> tuple[ExpertBatch, Receipt]:
        """Regroup what arrived by expert."""
        plan: DispatchPlan = pending.detail
        groups: Groups = plan.detail.groups
        rows_RD, weights_R = groups.regroup(*finish(pending))
        batch = ExpertBatch(
            rows_RD=rows_RD,
            row_weights_R=weights_R,
            counts_e=groups.counts_e,
            offsets_e=groups.offsets_e,
            counts_host=groups.sizes,
        )
        return batch, Receipt(plan=plan)

    def start_combine(self, rows_RD: Tensor, receipt: Receipt) -> Pending:
        """Send rows back in the order in which they came."""
        way: _Way = receipt.plan.detail
        return self._move([way.groups.restore(rows_RD)], way.received, way.sent, detail=way)

    def finish_combine(self, pending: Pending) -> Tensor:
        """Add up each token's rows."""
        way: _Way = pending.detail
        (rows_ND,) = finish(pending)
        return gather_sum(rows_ND, way.slots.rows)

    def _move(self, tensors: Sequence[Tensor], sent: Splits, received: Splits, *, detail: object) -> Pending:
        if self.group is None:
            return stay(tensors, detail=detail)
        there, back = self._exchange(sent, received), self._exchange(received, sent)
        return start(tensors, forward=there, dual=back, detail=detail)

    def _exchange(self, sent: Splits, received: Splits) -> Launch:
        def launch(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Work]]:
            buffers = [tensor.new_empty(sum(received), *tensor.shape[1:]) for tensor in tensors]
            works = [
                dist.all_to_all_single(buffer, tensor, list(received), list(sent), group=self.group, async_op=True)
                for buffer, tensor in zip(buffers, tensors, strict=True)
            ]
            return buffers, works

        return launch
