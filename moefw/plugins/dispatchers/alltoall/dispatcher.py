"""All-to-all dispatch: sort rows by expert, send each rank its rows, sort there by (expert, source rank, token).

Shapes: legend in :mod:`moefw.core.stages`; ``P`` ranks, ``N`` rows sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import final

from torch import Tensor
from torch.nn import functional as F

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec, Dispatcher
from moefw.core.stages import DispatchHandle, DispatchPlan, ExpertBatch, Pending, Routing
from moefw.plugins.dispatchers.alltoall.metadata import Metadata, Parts
from moefw.plugins.dispatchers.alltoall.static import Limit, within
from moefw.runtime.communication.exchange import by_rank, exchange, exchange_now
from moefw.runtime.communication.movement import finish
from moefw_kernels.devices import on_host
from moefw_kernels.permute import Sorted, gather_sum, group_chunks, sort_choices, weights_of

Counts = Sequence[Sequence[int]]
"""Numbers of rows by rank and expert."""


@final
class AllToAllDispatcher(Dispatcher):
    """Dispatch exchanges rows and weights, combine only rows; ``plan`` exchanges e counts per pair of ranks.

    Where an expert is split over several ranks (etp > 1), a row travels to the rank that holds the sender's part, and
    from there to the other parts.
    """

    def __init__(
        self,
        experts: ExpertGroup,
        *,
        row_alignment: int,
        counts_on_host: bool = True,
        codec: Codec | None = None,
        limit: Limit | None = None,
    ) -> None:
        self.experts, self.row_alignment, self.codec = experts, row_alignment, codec
        self.counts_on_host, self.limit = counts_on_host, limit

    def plan(self, routing: Routing, *, counts: Counts | None = None, dropless: bool = False) -> DispatchPlan:
        """Sort the choices and exchange the number of rows that each rank sends for each expert.

        The host waits once. Under a budget, see :func:`moefw.plugins.dispatchers.alltoall.static.within`.
        """
        if self.limit is not None and not dropless:
            return DispatchPlan(
                detail=within(
                    self.limit,
                    self.experts,
                    routing.expert_ids_TK,
                    row_alignment=self.row_alignment,
                    counts_on_host=self.counts_on_host,
                )
            )
        experts, capacity = self.experts, routing.capacity or 0
        if routing.counts_host is not None:
            counts = [routing.counts_host] * experts.size
        found = sort_choices(routing.expert_ids_TK, experts.num_experts)
        if counts is None:
            offered_Pe, asked_Pe, capacity = self._exchange_counts(found.counts, capacity)
        else:
            asked_Pe = [self._share(counts[rank], experts.rank) for rank in range(experts.size)]
            offered_Pe = [self._share(counts[experts.rank], rank) for rank in range(experts.size)]
            capacity *= experts.size
        return DispatchPlan(detail=self._way(found, offered_Pe, asked_Pe, capacity))

    def _share(self, counts_E: Sequence[int], rank: int) -> Sequence[int]:
        """Return the part of one rank's counts that concerns the experts of ``rank``."""
        first = rank // self.experts.etp * self.experts.local_experts
        return counts_E[first : first + self.experts.local_experts]

    def _exchange_counts(self, counts_E: Tensor, capacity: int) -> tuple[Counts, Counts, int]:
        """Return the rows for each (rank, local expert), sent and received, and the sum of all capacities."""
        size, ones = self.experts.size, [1] * self.experts.size
        offered_Pe = F.pad(by_rank(counts_E, self.experts), (0, 1), value=capacity)
        asked_Pe = exchange_now(offered_Pe, ones, ones, self.experts.group)
        both = on_host(offered_Pe, asked_Pe)
        capacity = sum(both[1][rank][-1] for rank in range(size))
        offered, asked = ([of_rank[:-1] for of_rank in side] for side in both)
        return offered, asked, capacity

    def _way(self, found: Sorted, offered: Counts, asked: Counts, capacity: int) -> Metadata:
        """Return the metadata. Rows travel between ranks of the same part, which then share them with other parts."""
        experts, device = self.experts, found.counts.device
        part = experts.rank % experts.etp
        ours = [rank % experts.etp == part for rank in range(experts.size)]
        sent = [sum(rows) if mine else 0 for rows, mine in zip(offered, ours, strict=True)]
        received = [sum(rows) if mine else 0 for rows, mine in zip(asked, ours, strict=True)]
        arrival = list(chain.from_iterable(range(p, experts.size, experts.etp) for p in range(experts.etp)))
        groups = group_chunks(
            [asked[rank] for rank in arrival],
            self.row_alignment,
            device,
            capacity=capacity,
            order=sorted(range(experts.size), key=arrival.__getitem__) if experts.etp > 1 else None,
        )
        parts = Parts.of(experts, [sum(rows) for rows in asked]) if experts.etp > 1 else None
        return Metadata(found.slots(sum(sent)), sent, received, parts, groups)

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: DispatchPlan) -> Pending:
        """Send one row per (token, expert), and its weight."""
        metadata: Metadata = plan.detail
        sent, received, slots, group = metadata.sent, metadata.received, metadata.slots, self.experts.group
        tensors = [x_TD, weights_of(weights_TK, slots.slot_R)]
        return exchange(tensors, sent, received, group, codec=self.codec, rows=slots.rows, detail=plan)

    def start_redispatch(self, x_TD: Tensor, weights_TK: Tensor, handle: DispatchHandle) -> Pending:
        """Send again along the same plan."""
        return self.start_dispatch(x_TD, weights_TK, handle.plan)

    def finish_dispatch(self, pending: Pending) -> tuple[ExpertBatch, DispatchHandle]:
        """Regroup the received rows by expert."""
        plan: DispatchPlan = pending.detail
        metadata: Metadata = plan.detail
        rows_ND, weights_N = finish(pending)
        if metadata.parts is not None:
            rows_ND, weights_N = metadata.parts.share([rows_ND, weights_N], self.codec)
        batch = ExpertBatch.of(metadata.regroup(rows_ND, weights_N), metadata.groups, metadata.stats)
        return batch, DispatchHandle(plan=plan)

    def start_combine(self, rows_RD: Tensor, handle: DispatchHandle) -> Pending:
        """Send rows back in the order in which they arrived."""
        metadata: Metadata = handle.plan.detail
        rows_ND = metadata.restore(rows_RD)
        if metadata.parts is not None:
            rows_ND = metadata.parts.add_up(rows_ND)
        return exchange([rows_ND], metadata.received, metadata.sent, self.experts.group, detail=metadata)

    def finish_combine(self, pending: Pending) -> Tensor:
        """Add up each token's rows."""
        metadata: Metadata = pending.detail
        (rows_ND,) = finish(pending)
        return gather_sum(rows_ND, metadata.slots.rows)
