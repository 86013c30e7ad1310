"""The runtime part of ``sample``.

Shapes: legend in :mod:`moefw.core.stages`; ``N`` rows are sent, or received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import moefw
from attrs import frozen
from moefw.core.context import ExpertGroup
from moefw.runtime.communication.exchange import exchange, exchange_now
from moefw.runtime.communication.movement import finish
from moefw_kernels.permute import Groups, Slots, gather, gather_sum, group_chunks, sort_slots
from torch import Tensor
from torch.nn import functional as F


@frozen(kw_only=True, eq=False)
class Metadata:
    """The metadata of one movement: which rows are sent where, and how received rows are grouped by expert."""

    slots: Slots
    sent: Sequence[int]
    received: Sequence[int]
    groups: Groups


@final
class SampleDispatcher(moefw.Dispatcher[Metadata, Metadata]):
    """Keeps no state between calls: the plan, which is also the handle, holds the data of a movement."""

    def __init__(self, experts: ExpertGroup, *, row_alignment: int) -> None:
        self.experts = experts
        self.row_alignment = row_alignment

    def plan(
        self, routing: moefw.Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> Metadata:
        """Sort the choices by expert, and send every rank its number of rows for each of its experts."""
        experts = self.experts
        parts_TK = experts.parts(routing.expert_ids_TK)
        slots = sort_slots(parts_TK, experts.size * experts.local_experts)
        offered_Pe = slots.counts.view(experts.size, experts.local_experts)
        ones = [1] * experts.size
        told_Pe = F.pad(offered_Pe, (0, 1), value=routing.capacity or 0)
        asked = exchange_now(told_Pe, ones, ones, experts.metadata_group).tolist()
        groups = group_chunks(
            [of_rank[:-1] for of_rank in asked],
            self.row_alignment,
            slots.slot_R.device,
            capacity=sum(of_rank[-1] for of_rank in asked),
        )
        received = [sum(of_rank[:-1]) for of_rank in asked]
        return Metadata(slots=slots, sent=offered_Pe.sum(1).tolist(), received=received, groups=groups)

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: Metadata) -> moefw.Pending[Metadata]:
        """Send one row per (token, part of an expert), and its weight."""
        rows_ND = gather(x_TD, plan.slots.rows)
        weights = weights_TK.repeat_interleave(self.experts.etp, 1).flatten()
        weights_N = weights.index_select(0, plan.slots.slot_R)
        return exchange([rows_ND, weights_N], plan.sent, plan.received, self.experts.group, detail=plan)

    def finish_dispatch(self, pending: moefw.Pending[Metadata]) -> tuple[moefw.ExpertBatch, Metadata]:
        """Regroup received rows from order (rank, expert, token) to (expert, rank, token)."""
        plan = pending.detail
        rows_ND, weights_N = finish(pending)
        return moefw.ExpertBatch.of(plan.groups.regroup(rows_ND, weights_N), plan.groups), plan

    def start_combine(self, rows_RD: Tensor, handle: Metadata) -> moefw.Pending[Metadata]:
        """Send rows back in the order in which they arrived."""
        rows_ND = handle.groups.restore(rows_RD)
        return exchange([rows_ND], handle.received, handle.sent, self.experts.group, detail=handle)

    def finish_combine(self, pending: moefw.Pending[Metadata]) -> Tensor:
        """Add up each token's rows."""
        (rows_ND,) = finish(pending)
        return gather_sum(rows_ND, pending.detail.slots.rows)
