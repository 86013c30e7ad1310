"""All-gather dispatch: gather tokens, sort locally, compute, reduce-scatter partial sums back.

Ranks may hold different numbers of tokens: shorter ones are padded to the longest (``M``) for the collectives.
Shapes: legend in :mod:`moefw.core.stages`; ``P`` expert-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moefw.core.contracts import Dispatcher
from moefw.core.movement import Pending, Work, finish, start, stay
from moefw.core.stages import DispatchPlan, ExpertBatch, Receipt, Routing
from moefw_kernels.permute import Groups, Slots, gather, gather_sum, group_chunks, sort_slots

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renamed both."""


@dataclass(frozen=True, slots=True, eq=False)
class _Gathered:
    """The metadata of one movement: the gathered choices that are ours, sorted by expert, and their padding."""

    num_tokens: int
    longest: int
    slots: Slots
    groups: Groups


@final
class AllGatherDispatcher(Dispatcher):
    """One all-gather of tokens and one of weights; one reduce-scatter back. ``plan`` gathers the routing."""

    def __init__(
        self, group: ProcessGroup | None, *, num_ranks: int, rank: int, num_experts: int, row_alignment: int
    ) -> None:
        self.group, self.num_ranks, self.rank = group, num_ranks, rank
        self.num_experts, self.row_alignment = num_experts, row_alignment

    def plan(self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None) -> DispatchPlan:
        """Gather every rank's choices and sort those of this rank's experts. ``counts`` saves nothing here."""
        ids_TK = routing.expert_ids_TK
        longest = len(ids_TK)
        if self.group is not None:
            length = torch.tensor([len(ids_TK)], device=ids_TK.device)
            dist.all_reduce(length, op=dist.ReduceOp.MAX, group=self.group)
            longest = int(length)
            mine_MK = F.pad(ids_TK, (0, 0, 0, longest - len(ids_TK)), value=-1)
            gathered = ids_TK.new_empty(self.num_ranks * longest, ids_TK.shape[1])
            all_gather(gathered, mine_MK, group=self.group)
        else:
            gathered = ids_TK
        local = self.num_experts // self.num_ranks
        slots = sort_slots(gathered - self.rank * local, local)
        groups = group_chunks([slots.counts.tolist()], self.row_alignment, ids_TK.device)
        return DispatchPlan(detail=_Gathered(len(ids_TK), longest, slots, groups))

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: DispatchPlan) -> Pending:
        """Gather all tokens and their weights."""
        extra = plan.detail.longest - plan.detail.num_tokens
        sent = [F.pad(x_TD, (0, 0, 0, extra)), F.pad(weights_TK, (0, 0, 0, extra))] if extra else [x_TD, weights_TK]
        if self.group is None:
            return stay(sent, detail=plan)
        return start(sent, forward=self._gather, dual=self._reduce, detail=plan)

    def start_redispatch(self, x_TD: Tensor, weights_TK: Tensor, receipt: Receipt) -> Pending:
        """Gather again; the sorted choices are reused."""
        return self.start_dispatch(x_TD, weights_TK, receipt.plan)

    def finish_dispatch(self, pending: Pending) -> tuple[ExpertBatch, Receipt]:
        """Pick the rows of this rank's experts."""
        plan: DispatchPlan = pending.detail
        slots, groups = plan.detail.slots, plan.detail.groups
        gathered_TD, gathered_TK = finish(pending)
        weights_N = gathered_TK.flatten().index_select(0, slots.slot_R)
        rows_RD, weights_R = groups.regroup(gather(gathered_TD, slots.rows), weights_N)
        batch = ExpertBatch(
            rows_RD=rows_RD,
            row_weights_R=weights_R,
            counts_e=groups.counts_e,
            offsets_e=groups.offsets_e,
            counts_host=groups.sizes,
        )
        return batch, Receipt(plan=plan)

    def start_combine(self, rows_RD: Tensor, receipt: Receipt) -> Pending:
        """Add up each gathered token's rows here, and reduce the partial sums to the tokens' ranks."""
        way: _Gathered = receipt.plan.detail
        partial_TD = gather_sum(way.groups.restore(rows_RD), way.slots.rows)
        if self.group is None:
            return stay([partial_TD], detail=way)
        return start([partial_TD], forward=self._reduce, dual=self._gather, detail=way)

    def finish_combine(self, pending: Pending) -> Tensor:
        """Drop the padding of shorter ranks."""
        (out_MD,) = finish(pending)
        return out_MD[: pending.detail.num_tokens]

    def _gather(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Work]]:
        buffers = [tensor.new_empty(len(tensor) * self.num_ranks, *tensor.shape[1:]) for tensor in tensors]
        works: list[Work] = [
            all_gather(buffer, tensor, group=self.group, async_op=True)
            for buffer, tensor in zip(buffers, tensors, strict=True)
        ]
        return buffers, works

    def _reduce(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Work]]:
        buffers = [tensor.new_empty(len(tensor) // self.num_ranks, *tensor.shape[1:]) for tensor in tensors]
        works: list[Work] = [
            reduce_scatter(buffer, tensor, group=self.group, async_op=True)
            for buffer, tensor in zip(buffers, tensors, strict=True)
        ]
        return buffers, works
