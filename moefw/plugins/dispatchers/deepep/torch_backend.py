"""Rank-deduplicated dispatch over a process group: a token travels once to each rank, with its expert ids and weights.

Shapes: legend in :mod:`moefw.core.stages`; ``P`` ranks, ``N`` rows on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.core.context import ExpertGroup
from moefw.core.contracts import Codec, Dispatcher
from moefw.core.stages import ExpertBatch, Pending, Routing
from moefw.runtime.communication.exchange import Splits, by_rank, exchange, exchange_now
from moefw.runtime.communication.movement import finish
from moefw_kernels.devices import on_host
from moefw_kernels.permute import Arrival, RowMap, arrange, count_ids, distinct, gather_sum, sort_choices


@dataclass(slots=True, eq=False)
class _Metadata:
    """The metadata of one movement: rows sent in order (rank, token), and how rows that arrive are expanded."""

    rows: RowMap
    sent: Splits
    received: Splits
    arrival: Arrival


@final
class TorchDeepEP(Dispatcher[_Metadata, _Metadata]):
    """Dispatch exchanges rows and weights, combine only rows; ``plan`` exchanges counts and each row's expert ids."""

    def __init__(self, experts: ExpertGroup, *, row_alignment: int, codec: Codec | None = None) -> None:
        self.experts = experts
        self.row_alignment = row_alignment
        self.codec = codec

    def plan(
        self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> _Metadata:
        """Find the ranks that each token must reach, and send them its expert ids. ``counts`` is unused.

        The host waits once.
        """
        experts = self.experts
        ids_TK = routing.expert_ids_TK
        # (T, K) -> the ranks of each token, each once -> rows in order (rank, token), their number by rank (P)
        to_ranks = sort_choices(distinct(experts.owners(ids_TK)), experts.size)
        # A line goes to each rank, (P, 2 + e): the rows for it, the choices of each of its experts, our capacity.
        counts_Pe = by_rank(count_ids(ids_TK, experts.num_experts), experts)
        lines_to_P = F.pad(torch.cat([to_ranks.counts.unsqueeze(1), counts_Pe], 1), (0, 1), value=routing.capacity or 0)
        ones = [1] * experts.size
        sent, lines_from = on_host(to_ranks.counts, exchange_now(lines_to_P, ones, ones, experts.metadata_group))
        received = [line[0] for line in lines_from]
        choices_Pe = [line[1:-1] for line in lines_from]
        # The ids of the rows that arrive, as numbers of this rank's experts: (N, K)
        slots = to_ranks.slots(sum(sent))
        ids_NK = ids_TK.index_select(0, slots.rows.token_R).to(torch.int32)
        local_NK = exchange_now(ids_NK, sent, received, experts.metadata_group).long() - experts.first_expert
        arrival = arrange(
            local_NK,
            experts.local_experts,
            alignment=self.row_alignment,
            capacity=sum(line[-1] for line in lines_from),
            counts=[sum(choices_P) for choices_P in zip(*choices_Pe, strict=True)],
        )
        return _Metadata(slots.rows, sent, received, arrival)

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: _Metadata) -> Pending[_Metadata]:
        """Send one row per (token, rank), and the weights of all its choices."""
        # Tokens (T, D) -> rows (N, D), by ``rows``; weights (T, K) -> (N, K)
        return exchange(
            [x_TD, weights_TK.index_select(0, plan.rows.token_R)],
            plan.sent,
            plan.received,
            self.experts.group,
            codec=self.codec,
            rows=plan.rows,
            detail=plan,
        )

    def finish_dispatch(self, pending: Pending[_Metadata]) -> tuple[ExpertBatch, _Metadata]:
        """Expand the received rows to one row per (row, local expert)."""
        metadata = pending.detail
        rows_ND, weights_NK = finish(pending)
        # (N, D) and (N, K) -> (R, D) and (R), grouped by expert
        return ExpertBatch.of(metadata.arrival.expand(rows_ND, weights_NK), metadata.arrival), metadata

    def start_combine(self, rows_RD: Tensor, handle: _Metadata) -> Pending[_Metadata]:
        """Add up each received row over its local experts, and send back one row per (token, rank)."""
        # (R, D) -> (N, D)
        partial_ND = handle.arrival.reduce(rows_RD)
        return exchange([partial_ND], handle.received, handle.sent, self.experts.group, detail=handle)

    def finish_combine(self, pending: Pending[_Metadata]) -> Tensor:
        """Add up each token over its ranks."""
        (rows_ND,) = finish(pending)
        # (N, D) -> (T, D)
        return gather_sum(rows_ND, pending.detail.rows)
