"""Dispatchers that promise no order of an expert's rows: a correct one, and some that break what they still promise."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from broken_dispatchers import Wrapper, breaks, changed
from moefw.core.stages import ExpertBatch

ANY_ORDER = {"repeats": False}


@dataclass(frozen=True, eq=False)
class Drawn:
    """The handle of a dispatch, and the order that was drawn for it."""

    handle: Any
    order_R: Tensor


class Unordered(Wrapper):
    """Brings the rows of each expert in another order each time, which the handle records."""

    def start_redispatch(self, x_TD, weights_TK, handle):
        pending = super().start_redispatch(x_TD, weights_TK, handle.handle)
        return replace(pending, detail=(pending.detail, handle.order_R))

    def finish_dispatch(self, pending):
        plan, order_R = pending.detail if isinstance(pending.detail, tuple) else (pending.detail, None)
        batch, handle = self.inner.finish_dispatch(replace(pending, detail=plan))
        order_R = self.drawn(batch) if order_R is None else order_R
        return self.in_order(batch, order_R), Drawn(handle, order_R)

    def start_combine(self, rows_RD, handle):
        return self.inner.start_combine(rows_RD[handle.order_R.argsort()], handle.handle)

    def in_order(self, batch: ExpertBatch, order_R: Tensor) -> ExpertBatch:
        return changed(batch, rows_RD=batch.rows_RD[order_R], row_weights_R=batch.row_weights_R[order_R])

    def drawn(self, batch: ExpertBatch) -> Tensor:
        order, begin = list(range(len(batch.rows_RD))), 0
        for count, end in zip(batch.counts_e.tolist(), batch.offsets_e.tolist(), strict=True):
            group = slice(begin, begin + count)
            order[group] = random.SystemRandom().sample(order[group], count)
            begin = end
        return torch.tensor(order, dtype=torch.int64)


@breaks(
    "to other places than the dispatch of its handle",
    "redispatch_brings_rows_to_the_places_of_their_dispatch",
    offers=ANY_ORDER,
)
class DrawsAnOrderForEachRedispatch(Unordered):
    def start_redispatch(self, x_TD, weights_TK, handle):
        return self.start_dispatch(x_TD, weights_TK, handle.handle)


@breaks(
    "to other places than the dispatch of its handle",
    "rows_of_keys_are_redispatched_bit_for_bit",
    offers=ANY_ORDER | {"row_keys": True},
)
class DrawsAnOrderForEachRedispatchOfKeys(DrawsAnOrderForEachRedispatch):
    pass


@breaks("carries the weight", "each_row_carries_the_weight_of_its_choice", offers=ANY_ORDER)
class LeavesWeightsInTheirPlaces(Unordered):
    def in_order(self, batch, order_R):
        return changed(super().in_order(batch, order_R), row_weights_R=batch.row_weights_R)


@breaks(
    "did not come to expert 1 bit for bit: its row 0 is token 2 of rank 0",
    "rows_come_in_order_of_expert_source_rank_and_token",
    offers=ANY_ORDER,
)
class TakesRowsOfOtherExperts(Unordered):
    def drawn(self, batch):
        return torch.arange(len(batch.rows_RD)).roll(1)


@breaks("get another gradient", "rows_get_the_gradients_of_their_tokens_outputs", offers=ANY_ORDER)
class ReturnsRowsFromOtherPlaces(Unordered):
    def start_combine(self, rows_RD, handle):
        return self.inner.start_combine(rows_RD, handle.handle)
