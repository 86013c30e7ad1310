"""Ring dispatch: every rank picks rows of its experts from the passing tokens, and adds to the returning sums.

Shapes: legend in :mod:`moefw.core.stages`; ``P`` ranks, ``N`` rows that leave on a lane, ``A`` rows that this rank has
in the end: its own tokens, then the rows that arrived on each lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from attrs import frozen
from torch import Tensor

import moefw
from moefw.core.context import ExpertGroup
from moefw.runtime.communication.exchange import exchange_now
from moefw.runtime.communication.movement import finish, start, stay
from moefw_kernels.permute import Arrival, Slots, arrange, gather, gather_sum, sort_slots
from moefw_ring.lane import Lane, Onward, Return


@frozen(kw_only=True, eq=False)
class _Metadata:
    """The metadata of one movement: the lanes, which tokens leave on each, and the rows of this rank's experts."""

    lanes: Sequence[Lane]
    leaving: Sequence[Slots]
    arrival: Arrival
    num_tokens: int


_Kept = tuple[_Metadata, Tensor, Tensor]
"""What finishes a dispatch: its metadata, and this rank's own tokens and weights, which do not travel."""


@final
class RingDispatcher(moefw.Dispatcher[_Metadata, _Metadata]):
    """Sends a token from rank to rank up to the last with one of its experts; sums return the same way.

    Ranks that hold parts of the same experts (etp > 1) are treated like all others: each adds its partial sum.
    """

    def __init__(self, experts: ExpertGroup, *, row_alignment: int, both_ways: bool) -> None:
        self.experts = experts
        self.row_alignment = row_alignment
        others = experts.size - 1
        ways = {1: others - others // 2, -1: others // 2} if both_ways else {1: others}
        self.ways = {step: hops for step, hops in ways.items() if hops}

    def plan(
        self, routing: moefw.Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> _Metadata:
        """Pass the choices around and sort those of this rank's experts. ``counts`` is not used."""
        ids_TK = routing.expert_ids_TK
        leaving = [self._leaving(ids_TK, step, hops) for step, hops in self.ways.items()]
        by_rank = self._exchange_counts(len(ids_TK), routing.capacity or 0, leaving)
        lanes = list(self._lanes(by_rank))
        first = sum(num_tokens for num_tokens, *_ in by_rank[: self.experts.rank])
        places_T = torch.arange(first, first + len(ids_TK), device=ids_TK.device)
        notes_T = torch.cat([places_T.unsqueeze(1), ids_TK], 1)
        notes_A = torch.cat([notes_T, *self._pass_on(notes_T.int(), lanes, leaving)])
        arrival = arrange(
            notes_A[:, 1:] - self.experts.first_expert,
            self.experts.local_experts,
            alignment=self.row_alignment,
            capacity=sum(capacity for _, capacity, *_ in by_rank),
            source_N=notes_A[:, 0],
        )
        return _Metadata(lanes=lanes, leaving=leaving, arrival=arrival, num_tokens=len(ids_TK))

    def _leaving(self, ids_TK: Tensor, step: int, hops: int) -> Slots:
        """Tokens that leave on the lane of ``step``: those that go furthest first, else in order.

        ``counts`` lists the number of tokens that make ``hops`` hops, then ``hops - 1``, and so on.
        """
        owners = self.experts.owners(ids_TK)
        distances = ((owners - self.experts.rank) * step).remainder(self.experts.size)
        distances = distances.masked_fill((owners < 0) | (distances > hops), 0)
        furthest_T1 = distances.amax(1, keepdim=True)
        return sort_slots((hops - furthest_T1).masked_fill(furthest_T1 == 0, -1), hops)

    def _exchange_counts(self, num_tokens: int, capacity: int, leaving: Sequence[Slots]) -> list[list[int]]:
        """Exchange and return each rank's number of tokens, its capacity, and its tokens that make each lane's hops."""
        mine = [slots.counts.cumsum(0).flip(0) for slots in leaving]
        head = torch.tensor([num_tokens, capacity], device=leaving[0].counts.device if leaving else None)
        ones = [1] * self.experts.size
        told_P = torch.cat([head, *mine]).repeat(len(ones), 1)
        counts_P = exchange_now(told_P, ones, ones, self.experts.metadata_group)
        by_rank: list[list[int]] = counts_P.tolist()
        return by_rank

    def _lanes(self, by_rank: Sequence[Sequence[int]]) -> Iterator[Lane]:
        begin = 2
        group = self.experts.group
        for step, hops in self.ways.items():
            assert group is not None, "a rank that is alone has no lane"
            rows = [of_rank[begin : begin + hops] for of_rank in by_rank]
            yield Lane(group=group, rank=self.experts.rank, step=step, rows=rows)
            begin += hops

    def _pass_on(self, notes_T: Tensor, lanes: Sequence[Lane], leaving: Sequence[Slots]) -> list[Tensor]:
        """Exchange the notes of tokens, and return those of the tokens that will arrive, lane by lane."""
        if not lanes:
            return []
        notes, works = Onward(lanes)([notes_T.index_select(0, slots.slot_R) for slots in leaving])
        for work in works:
            work.wait()
        return notes

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: _Metadata) -> moefw.Pending[_Kept]:
        """Send the leaving tokens and their weights on their first hop."""
        detail = (plan, x_TD, weights_TK)
        if not plan.lanes:
            return stay([], detail=detail)
        sent = [gather(tensor, slots.rows) for slots in plan.leaving for tensor in (x_TD, weights_TK)]
        return start(sent, forward=Onward(plan.lanes), dual=Return(plan.lanes), detail=detail)

    def finish_dispatch(self, pending: moefw.Pending[_Kept]) -> tuple[moefw.ExpertBatch, _Metadata]:
        """Pass tokens on until all have been where they are needed, and return the rows of this rank's experts."""
        plan, x_TD, weights_TK = pending.detail
        came = finish(pending)
        x_AD = torch.cat([x_TD, *came[::2]])
        weights_AK = torch.cat([weights_TK, *came[1::2]])
        return moefw.ExpertBatch.of(plan.arrival.expand(x_AD, weights_AK), plan.arrival), plan

    def start_combine(self, rows_RD: Tensor, handle: _Metadata) -> moefw.Pending[tuple[_Metadata, Tensor]]:
        """Sum each token's rows on this rank, and send the sums of other ranks' tokens on their first hop back."""
        sum_AD = handle.arrival.reduce(rows_RD)
        own_TD, *away = sum_AD.split([handle.num_tokens, *(sum(lane.arriving) for lane in handle.lanes)])
        if not handle.lanes:
            return stay([], detail=(handle, own_TD))
        return start(away, forward=Return(handle.lanes), dual=Onward(handle.lanes), detail=(handle, own_TD))

    def finish_combine(self, pending: moefw.Pending[tuple[_Metadata, Tensor]]) -> Tensor:
        """Add the sums that came back to the sums of this rank."""
        metadata, out_TD = pending.detail
        for slots, home_ND in zip(metadata.leaving, finish(pending), strict=True):
            out_TD = out_TD + gather_sum(home_ND, slots.rows)
        return out_TD
