"""All-to-all dispatch: sort rows by expert, send each rank its rows, sort there by (expert, source rank, token).

Shapes: legend in :mod:`moefw.core.stages`; ``P`` ranks, ``N`` rows on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import final

from torch import Tensor
from torch.nn import functional as F

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec, Dispatcher
from moefw.core.stages import ExpertBatch, Pending, Routing
from moefw.plugins.dispatchers.alltoall.metadata import Metadata, Parts
from moefw.plugins.dispatchers.alltoall.static import Limit, within
from moefw.runtime.communication.exchange import by_rank, exchange, exchange_now
from moefw.runtime.communication.movement import finish
from moefw_kernels.devices import on_host
from moefw_kernels.permute import Sorted, gather_sum, group_chunks, sort_choices, weights_of

Counts = Sequence[Sequence[int]]
"""Numbers of rows by rank and expert."""


@final
class AllToAllDispatcher(Dispatcher[Metadata, Metadata]):
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
        self.experts = experts
        self.row_alignment = row_alignment
        self.counts_on_host = counts_on_host
        self.codec = codec
        self.limit = limit

    def plan(self, routing: Routing, *, counts: Counts | None = None, dropless: bool = False) -> Metadata:
        """Sort the choices and exchange the number of rows that each rank sends for each expert.

        The host waits once. Under a budget, see :func:`moefw.plugins.dispatchers.alltoall.static.within`.
        """
        if self.limit is not None and not dropless:
            return within(
                self.limit,
                self.experts,
                routing.expert_ids_TK,
                row_alignment=self.row_alignment,
                counts_on_host=self.counts_on_host,
            )
        experts = self.experts
        capacity = routing.capacity or 0
        if routing.counts_host is not None:
            # The router knows that its counts are those of every rank.
            counts = [routing.counts_host] * experts.size
        # (T, K) -> choices in order (expert, token), their number by expert (E)
        choices = sort_choices(routing.expert_ids_TK, experts.num_experts)
        if counts is None:
            rows_to_Pe, rows_from_Pe, capacity = self._exchange_counts(choices.counts, capacity)
        else:
            rows_to_Pe = [self._share(counts[experts.rank], rank) for rank in range(experts.size)]
            rows_from_Pe = [self._share(counts[rank], experts.rank) for rank in range(experts.size)]
            capacity *= experts.size
        return self._metadata(choices, rows_to_Pe, rows_from_Pe, capacity)

    def _share(self, counts_E: Sequence[int], rank: int) -> Sequence[int]:
        """Counts of the experts of ``rank``, given those of all experts."""
        first = rank // self.experts.etp * self.experts.local_experts
        return counts_E[first : first + self.experts.local_experts]

    def _exchange_counts(self, counts_E: Tensor, capacity: int) -> tuple[Counts, Counts, int]:
        """Rows for each (rank, local expert), sent and received, and the sum of all capacities.

        A line goes to each rank: the rows for each of its experts, and this rank's capacity. The host waits once.
        """
        ones = [1] * self.experts.size
        # (E) -> (P, e) -> (P, e + 1)
        lines_to_P = F.pad(by_rank(counts_E, self.experts), (0, 1), value=capacity)
        lines_from_P = exchange_now(lines_to_P, ones, ones, self.experts.metadata_group)
        lines_to, lines_from = on_host(lines_to_P, lines_from_P)
        rows_to_Pe = [line[:-1] for line in lines_to]
        rows_from_Pe = [line[:-1] for line in lines_from]
        return rows_to_Pe, rows_from_Pe, sum(line[-1] for line in lines_from)

    def _metadata(self, choices: Sorted, rows_to_Pe: Counts, rows_from_Pe: Counts, capacity: int) -> Metadata:
        """Metadata. Rows travel between ranks of the same part, which then share them with other parts."""
        experts = self.experts
        etp = experts.etp
        part = experts.rank % etp
        sent = [0] * experts.size
        received = [0] * experts.size
        for rank in range(part, experts.size, etp):
            sent[rank] = sum(rows_to_Pe[rank])
            received[rank] = sum(rows_from_Pe[rank])
        # Rows arrive part by part, and within a part by rank, whether they come directly or from another part's rank.
        arrival = list(chain.from_iterable(range(p, experts.size, etp) for p in range(etp)))
        groups = group_chunks(
            [rows_from_Pe[rank] for rank in arrival],
            self.row_alignment,
            choices.counts.device,
            capacity=capacity,
            order=sorted(range(experts.size), key=arrival.__getitem__) if etp > 1 else None,
        )
        parts = Parts.of(experts, [sum(rows) for rows in rows_from_Pe]) if etp > 1 else None
        return Metadata(choices.slots(sum(sent)), sent, received, parts, groups)

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: Metadata) -> Pending[Metadata]:
        """Send one row per (token, expert), and its weight."""
        slots = plan.slots
        # Tokens (T, D) -> rows (N, D), by ``rows``; weights (T, K) -> (N)
        return exchange(
            [x_TD, weights_of(weights_TK, slots.slot_R, slots.rows)],
            plan.sent,
            plan.received,
            self.experts.group,
            codec=self.codec,
            rows=slots.rows,
            detail=plan,
        )

    def finish_dispatch(self, pending: Pending[Metadata]) -> tuple[ExpertBatch, Metadata]:
        """Regroup the received rows by expert."""
        metadata = pending.detail
        # (N, D) and (N), in order of source rank
        rows_ND, weights_N = finish(pending)
        if metadata.parts is not None:
            # -> rows of all parts, in order (part, source rank)
            rows_ND, weights_N = metadata.parts.share([rows_ND, weights_N], self.codec)
        # -> (R, D) and (R), grouped by expert
        batch = ExpertBatch.of(metadata.regroup(rows_ND, weights_N), metadata.groups, metadata.stats)
        return batch, metadata

    def start_combine(self, rows_RD: Tensor, handle: Metadata) -> Pending[Metadata]:
        """Send rows back in the order in which they arrived."""
        # (R, D), grouped by expert -> (N, D), in order (part, source rank)
        rows_ND = handle.restore(rows_RD)
        if handle.parts is not None:
            # -> rows of this rank's part, each the sum over the parts
            rows_ND = handle.parts.add_up(rows_ND)
        return exchange([rows_ND], handle.received, handle.sent, self.experts.group, detail=handle)

    def finish_combine(self, pending: Pending[Metadata]) -> Tensor:
        """Add up each token's rows."""
        (rows_ND,) = finish(pending)
        # (N, D) -> (T, D)
        return gather_sum(rows_ND, pending.detail.slots.rows)
