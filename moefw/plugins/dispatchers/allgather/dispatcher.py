"""All-gather dispatch: gather tokens, pick those of this rank's experts, compute, reduce-scatter partial sums back.

Ranks may hold different numbers of tokens: shorter ones are padded to the longest (``M``) for the collectives.
Shapes: legend in :mod:`moefw.core.stages`; ``P`` ranks.
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
from moefw.runtime.communication.gather import all_gather, gather, reduce
from moefw.runtime.communication.movement import finish
from moefw_kernels.devices import on_host
from moefw_kernels.permute import Arrival, arrange, count_ids


@dataclass(slots=True, eq=False)
class _Gathered:
    """The metadata of one movement: how the gathered tokens are expanded to the rows of this rank's experts.

    ``num_tokens``: those of this rank; ``longest``: the most of any rank.
    """

    num_tokens: int
    longest: int
    arrival: Arrival


@final
class AllGatherDispatcher(Dispatcher[_Gathered, _Gathered]):
    """One all-gather of tokens and one of weights; one reduce-scatter back. ``plan`` gathers the routing.

    An expert that is split over several ranks (etp > 1) needs no extra step: the reduce-scatter adds up partial sums.
    """

    def __init__(self, experts: ExpertGroup, *, row_alignment: int, codec: Codec | None = None) -> None:
        self.experts = experts
        self.row_alignment = row_alignment
        self.codec = codec

    def plan(
        self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> _Gathered:
        """Gather every rank's choices and sort those of this rank's experts. ``counts`` is unused.

        The host waits once.
        """
        experts = self.experts
        ids_TK = routing.expert_ids_TK
        lines = self._gather_sizes(ids_TK, routing.capacity or 0)
        longest = max(tokens for tokens, _, _ in lines)
        local = slice(experts.first_expert, experts.first_expert + experts.local_experts)
        local_counts_Pe = [counts_E[local] for _, _, counts_E in lines]
        # (T, K) -> (P * M, K) -> rows of this rank's experts (R)
        arrival = arrange(
            self._gather_ids(ids_TK, longest) - experts.first_expert,
            experts.local_experts,
            alignment=self.row_alignment,
            capacity=sum(capacity for _, capacity, _ in lines),
            counts=[sum(counts_P) for counts_P in zip(*local_counts_Pe, strict=True)],
        )
        return _Gathered(len(ids_TK), longest, arrival)

    def _gather_sizes(self, ids_TK: Tensor, capacity: int) -> list[tuple[int, int, list[int]]]:
        """Each rank's number of tokens, its capacity, and its number of choices of each expert."""
        counts_E = count_ids(ids_TK, self.experts.num_experts).int()
        # (E) -> (2 + E) -> (P, 2 + E)
        own = F.pad(F.pad(counts_E, (1, 0), value=capacity), (1, 0), value=len(ids_TK))
        of_ranks = own.new_empty(self.experts.size, len(own))
        all_gather(of_ranks.view(-1), own, group=self.experts.metadata_group)
        (lines,) = on_host(of_ranks)
        return [(line[0], line[1], line[2:]) for line in lines]

    def _gather_ids(self, ids_TK: Tensor, longest: int) -> Tensor:
        """Choices of all ranks, padded to the longest rank, ``(P * M, K)``. Padding has no experts, -1."""
        mine_MK = F.pad(ids_TK.to(torch.int32), (0, 0, 0, longest - len(ids_TK)), value=-1)
        gathered = mine_MK.new_empty(self.experts.size * longest, ids_TK.shape[1])
        all_gather(gathered, mine_MK, group=self.experts.metadata_group)
        return gathered.long()

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: _Gathered) -> Pending[_Gathered]:
        """Gather all tokens and their weights."""
        missing = plan.longest - plan.num_tokens
        if missing:
            # (T, D) and (T, K) -> (M, D) and (M, K)
            x_TD = F.pad(x_TD, (0, 0, 0, missing))
            weights_TK = F.pad(weights_TK, (0, 0, 0, missing))
        return gather([x_TD, weights_TK], self.experts.group, codec=self.codec, detail=plan)

    def finish_dispatch(self, pending: Pending[_Gathered]) -> tuple[ExpertBatch, _Gathered]:
        """Pick the rows of this rank's experts."""
        metadata = pending.detail
        # (P * M, D) and (P * M, K) -> (R, D) and (R), grouped by expert
        gathered_TD, gathered_TK = finish(pending)
        batch = ExpertBatch.of(metadata.arrival.expand(gathered_TD, gathered_TK), metadata.arrival)
        return batch, metadata

    def start_combine(self, rows_RD: Tensor, handle: _Gathered) -> Pending[_Gathered]:
        """Add up each gathered token's rows here, and reduce the partial sums to the tokens' ranks."""
        # (R, D) -> (P * M, D), then (M, D) on each rank
        partial_TD = handle.arrival.reduce(rows_RD)
        return reduce([partial_TD], self.experts.group, detail=handle)

    def finish_combine(self, pending: Pending[_Gathered]) -> Tensor:
        """Drop the padding of shorter ranks."""
        (out_MD,) = finish(pending)
        return out_MD[: pending.detail.num_tokens]
