"""Dispatchers that are broken on purpose, each in one way, with the words by which the suite must report it."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

import moefw
from moefw.core.contracts import Dispatcher
from moefw.core.plugin import DispatcherPlugin
from moefw.core.stages import ExpertBatch, Routing
from moefw.plugins.dispatchers.alltoall.dispatcher import AllToAllDispatcher


@frozen
class Broken:
    """A plugin, the words that name its fault, the check that must report them, and the worlds that it needs."""

    plugin: type[DispatcherPlugin]
    words: str
    check: str
    worlds: tuple[int, ...]


BROKEN: dict[str, Broken] = {}


def breaks(words: str, check: str, *, worlds: tuple[int, ...] = (1, 2), offers: Mapping[str, Any] | None = None):
    """Declare a plugin that builds the decorated class, and record the check that must find its fault."""
    promised = {
        "row_alignment": moefw.ANY,
        "rows": ("ragged", "padded"),
        "counts": ("host", "device"),
        **(offers or {}),
    }

    def declare(kind: type[Wrapper]) -> type[Wrapper]:
        body = {
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
            "name": kind.__name__.lower(),
            "offers": getattr(kind, "plugin_offers", lambda self, site: moefw.offers(**promised)),
            "build": lambda self, context: kind(context.expert_group(), context.facts["row_alignment"]),
        }
        plugin = frozen(type(f"{kind.__name__}Plugin", (DispatcherPlugin,), body))
        setattr(sys.modules[kind.__module__], plugin.__name__, plugin)
        BROKEN[kind.__name__] = Broken(plugin, words, f"test_{check}", worlds)
        return kind

    return declare


class Wrapper(Dispatcher):
    """Does the same as ``alltoall``. Subclasses change one thing."""

    def __init__(self, experts, row_alignment: int) -> None:
        self.experts, self.row_alignment = experts, row_alignment
        self.inner: Dispatcher = self.built()

    def built(self) -> Dispatcher:
        return AllToAllDispatcher(self.experts, row_alignment=self.row_alignment)

    def plan(self, routing, *, counts=None, dropless=False):
        return self.inner.plan(routing, counts=counts, dropless=dropless)

    def start_dispatch(self, x_TD, weights_TK, plan):
        return self.inner.start_dispatch(x_TD, weights_TK, plan)

    def finish_dispatch(self, pending):
        return self.inner.finish_dispatch(pending)

    def start_redispatch(self, x_TD, weights_TK, handle):
        return self.start_dispatch(x_TD, weights_TK, handle)

    def start_combine(self, rows_RD, handle):
        return self.inner.start_combine(rows_RD, handle)

    def finish_combine(self, pending):
        return self.inner.finish_combine(pending)


def changed(batch: ExpertBatch, **fields: Any) -> ExpertBatch:
    names = ("rows_RD", "row_weights_R", "counts_e", "offsets_e", "counts_host", "stats")
    return ExpertBatch(**{**{name: getattr(batch, name) for name in names}, **fields})


class Arriving(Wrapper):
    """Subclasses change the arriving batch."""

    def finish_dispatch(self, pending):
        batch, handle = self.inner.finish_dispatch(pending)
        return self.arrived(batch), handle


class Returning(Wrapper):
    """Subclasses change the returned tokens."""

    def finish_combine(self, pending):
        return self.returned(self.inner.finish_combine(pending), pending)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.factor(grad), None


@breaks("importing broken_dispatchers imports torch", "the_declaration_imports_no_torch")
class IsDeclaredBesideItsRuntime(Wrapper):
    pass


# State.


@breaks("keeps state between calls: self.last", "nothing_on_the_dispatcher_changes_between_calls")
class KeepsAPlan(Wrapper):
    last = None

    def plan(self, routing, **given):
        self.last = super().plan(routing, **given)
        return self.last


CACHE: dict[int, Tensor] = {}


@breaks("keeps state between calls: broken_dispatchers.CACHE", "nothing_on_the_dispatcher_changes_between_calls")
class KeepsInItsModule(Wrapper):
    def start_combine(self, rows_RD, handle):
        CACHE[len(rows_RD)] = rows_RD.detach().sum()
        return super().start_combine(rows_RD, handle)


class Pool:
    """Two buffers, taken in turn."""

    def __init__(self) -> None:
        self.buffers = [torch.zeros(0), torch.zeros(0)]

    def take(self, like: Tensor) -> Tensor:
        self.buffers.reverse()
        self.buffers[0] = like.detach().clone()
        return self.buffers[0]


BUFFERS = types.ModuleType(f"{__name__}.buffers")
"""Another module of the package of these dispatchers."""
BUFFERS.pool = Pool()
sys.modules[BUFFERS.__name__] = BUFFERS


@breaks(
    "keeps state between calls: broken_dispatchers.buffers.pool.buffers.0",
    "nothing_on_the_dispatcher_changes_between_calls",
)
class KeepsBuffersInItsPackage(Wrapper):
    def start_combine(self, rows_RD, handle):
        BUFFERS.pool.take(rows_RD)
        return super().start_combine(rows_RD, handle)


@breaks("tensors leak", "no_tensor_stays_alive_after_a_movement")
class LeaksTensors(Wrapper):
    held: list[Tensor] = []

    def start_dispatch(self, x_TD, weights_TK, plan):
        self.held.append(x_TD.clone())
        return super().start_dispatch(x_TD, weights_TK, plan)


@breaks("a later call on the same dispatcher", "a_call_does_not_depend_on_those_before")
class OnlyTheSecondCallIsWrong(Returning):
    calls = 0

    def returned(self, out_TD, pending):
        self.calls += 1
        return out_TD * 1.5 if self.calls == 3 else out_TD


@breaks("a second dispatcher in the process", "two_dispatchers_do_not_disturb_each_other")
class SharesAClassAttribute(Wrapper):
    alignment = [1]

    def built(self):
        self.alignment[0] = self.row_alignment
        return super().built()

    def plan(self, routing, **given):
        return AllToAllDispatcher(self.experts, row_alignment=self.alignment[0]).plan(routing, **given)


@breaks("when another movement is in flight", "two_movements_in_flight_do_not_disturb_each_other")
class BackwardKnowsTheLastForward(Returning):
    def returned(self, out_TD, pending):
        self.last = pending
        return ScaledGradient.apply(out_TD, lambda grad: 1.0 if self.last is pending else 2.0)


@functools.cache
def slots_of(dispatcher: Dispatcher) -> dict[int, int]:
    """Four numbers by slot, in a cache that no snapshot has."""
    return dict.fromkeys(range(4), 0)


@breaks("when 5 other movements are in flight", "six_movements_in_flight_do_not_disturb_each_other")
class HasRoomForFourMovements(Wrapper):
    def start_combine(self, rows_RD, handle):
        slots = slots_of(self)
        number = max(slots.values()) + 1
        slots[number % 4] = number
        pending = super().start_combine(rows_RD, handle)
        return replace(pending, detail=(pending.detail, number))

    def finish_combine(self, pending):
        detail, number = pending.detail
        out_TD = super().finish_combine(replace(pending, detail=detail))
        return out_TD if slots_of(self)[number % 4] == number else out_TD * 2


@breaks("combine after a later movement", "a_handle_and_a_plan_can_be_used_again")
class CombineKnowsTheLastPlan(Wrapper):
    def plan(self, routing, **given):
        self.tokens = routing.expert_ids_TK.flatten().tolist()
        plan = super().plan(routing, **given)
        self.mine = getattr(self, "mine", [])
        self.mine.append((plan, self.tokens))
        return plan

    def start_combine(self, rows_RD, handle):
        known = next(tokens for plan, tokens in self.mine if plan is handle)
        return super().start_combine(rows_RD if known == self.tokens else rows_RD * 2, handle)


@breaks("a movement that was given up", "a_movement_that_was_given_up_leaves_nothing_behind")
class CountsOpenMovements(Returning):
    open = 0

    def start_dispatch(self, x_TD, weights_TK, plan):
        self.open += 1
        return super().start_dispatch(x_TD, weights_TK, plan)

    def returned(self, out_TD, pending):
        self.open -= 1
        return out_TD * (1 + self.open)


@breaks("closed already", "close_may_be_called_twice_and_a_new_one_built")
class ClosesOnce(Wrapper):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


# Rows.


@breaks("came in the order", "rows_come_in_order_of_expert_source_rank_and_token")
class WrongOrder(Arriving):
    def _order(self, batch):
        order = torch.arange(len(batch.rows_RD))
        count = int(batch.counts_e[0])
        order[:count] = order[:count].flip(0)
        return order

    def arrived(self, batch):
        order = self._order(batch)
        return changed(batch, rows_RD=batch.rows_RD[order], row_weights_R=batch.row_weights_R[order])


@breaks("carries the weight", "each_row_carries_the_weight_of_its_choice")
class WeightsOfTheWrongRows(Arriving):
    def arrived(self, batch):
        return changed(batch, row_weights_R=batch.row_weights_R.roll(1))


@breaks("bit for bit", "rows_come_in_order_of_expert_source_rank_and_token")
class AppliesWeightsTwice(Arriving):
    def arrived(self, batch):
        return changed(batch, rows_RD=batch.rows_RD * batch.row_weights_R.unsqueeze(1).to(batch.rows_RD.dtype))


@breaks(
    "rows of keys are not redispatched bit for bit",
    "rows_of_keys_are_redispatched_bit_for_bit",
    offers={"row_keys": True},
)
class RedispatchesNumbers(Wrapper):
    def start_redispatch(self, x_TD, weights_TK, handle):
        return super().start_redispatch(x_TD.float().to(x_TD.dtype), weights_TK, handle)


@breaks("that pad the group of expert", "rows_that_pad_a_group_are_zero_with_weight_zero")
class FillsPadding(Arriving):
    def arrived(self, batch):
        empty_R1 = (batch.rows_RD == 0).all(1, keepdim=True)
        return changed(batch, rows_RD=torch.where(empty_R1, torch.ones_like(batch.rows_RD), batch.rows_RD))


@breaks("combine reads padding", "padding_and_undefined_rows_are_never_read")
class ReadsPadding(Wrapper):
    def start_combine(self, rows_RD, handle):
        return super().start_combine(rows_RD + 0 * rows_RD.sum(), handle)


LARGE = "thousands_of_wide_rows_are_moved_as_few_narrow_ones"


@breaks("token 200 of rank 0 did not come to expert 0 bit for bit: its row 200 is zero", LARGE)
class DropsRowsBehindThe200th(Arriving):
    def arrived(self, batch):
        begins_e = torch.cat([batch.offsets_e.new_zeros(1), batch.offsets_e[:-1]])
        kept = torch.zeros(len(batch.rows_RD))
        for begin, end in zip(begins_e.tolist(), batch.offsets_e.tolist(), strict=True):
            kept[begin : min(end, begin + 200)] = 1.0
        return changed(batch, rows_RD=batch.rows_RD * kept.unsqueeze(1).to(batch.rows_RD.dtype))


@breaks("its row 0 has other values, the first of them in column 64", LARGE)
class ForgetsColumnsBehind64(Arriving):
    def arrived(self, batch):
        is_known = torch.arange(batch.rows_RD.shape[1]) < 64
        return changed(batch, rows_RD=batch.rows_RD * is_known.to(batch.rows_RD.dtype))


@breaks("padded to the alignment", "counts_offsets_and_host_counts_are_those_of_the_routing")
class IgnoresTheAlignment(Wrapper):
    def built(self):
        return AllToAllDispatcher(self.experts, row_alignment=1)


@breaks("counts_host is", "counts_offsets_and_host_counts_are_those_of_the_routing")
class TellsTheHostUnpaddedCounts(Arriving):
    def arrived(self, batch):
        return changed(batch, counts_host=tuple(batch.counts_e.tolist()))


@breaks("counts_host is None", "the_host_knows_the_counts_where_that_is_offered")
class TellsTheHostNothing(Arriving):
    def arrived(self, batch):
        return changed(batch, counts_host=None)


@breaks("Routing.num_rows", "counts_that_no_part_asks_for_change_nothing")
class TakesDroppedChoicesForRows(Wrapper):
    def plan(self, routing, **given):
        if routing.num_rows is None:
            return super().plan(routing, **given)
        ids_TK = routing.expert_ids_TK.clamp_min(0)
        return super().plan(Routing(expert_ids_TK=ids_TK, weights_TK=routing.weights_TK), **given)


@breaks("instead of torch.int32", "tensors_have_the_shapes_and_dtypes_of_the_contract")
class CountsInInt64(Arriving):
    def arrived(self, batch):
        return changed(batch, counts_e=batch.counts_e.long())


@breaks(
    "expert 0 has 9 valid rows instead of 1: counts_e is", "counts_offsets_and_host_counts_are_those_of_the_routing"
)
class CountsDroppedChoices(Wrapper):
    def plan(self, routing, **given):
        ids_TK = routing.expert_ids_TK.clamp_min(0)
        return super().plan(Routing(expert_ids_TK=ids_TK, weights_TK=routing.weights_TK), **given)


@breaks("did not come to expert", "counts_offsets_and_host_counts_are_those_of_the_routing")
class DropsAToken(Wrapper):
    """The last token is sent to none of its experts, which shifts the rows of later ranks."""

    def plan(self, routing, **given):
        ids_TK = routing.expert_ids_TK.clone()
        ids_TK[-1:] = -1
        return super().plan(Routing(expert_ids_TK=ids_TK, weights_TK=routing.weights_TK), **given)


@breaks("groups end where", "groups_are_padded_to_the_capacity_of_all_source_ranks")
class IgnoresTheCapacity(Wrapper):
    def plan(self, routing, **given):
        return super().plan(Routing(expert_ids_TK=routing.expert_ids_TK, weights_TK=routing.weights_TK), **given)


@breaks("plan(counts=...)", "counts_that_the_host_knows_change_nothing", worlds=(2,))
class MisreadsGivenCounts(Wrapper):
    def plan(self, routing, *, counts=None, dropless=False):
        counts = None if counts is None else [[0, sum(row), *[0] * (len(row) - 2)] for row in counts]
        return super().plan(routing, counts=counts, dropless=dropless)


# Sums.


@breaks("not the sum of its experts' rows", "combine_of_dispatch_is_the_sum_of_what_the_experts_give")
class Averages(Returning):
    def returned(self, out_TD, pending):
        return out_TD / 2


@breaks("does not come back", "combine_of_dispatch_gives_each_token_once_for_every_kept_choice")
class ReturnsTokensTwice(Returning):
    def returned(self, out_TD, pending):
        return out_TD * 2


@breaks("raises", "combine_of_dispatch_is_the_sum_of_what_the_experts_give")
class FailsWithoutTokens(Wrapper):
    def start_dispatch(self, x_TD, weights_TK, plan):
        weights_TK.max()
        return super().start_dispatch(x_TD, weights_TK, plan)


@breaks("bf16", "combine_of_dispatch_is_the_sum_of_what_the_experts_give")
class AddsUpInEightBits(Returning):
    def returned(self, out_TD, pending):
        return out_TD.to(torch.float8_e4m3fn).to(out_TD.dtype) if out_TD.dtype == torch.bfloat16 else out_TD


@breaks("out_TD is torch.float32", "tensors_have_the_shapes_and_dtypes_of_the_contract")
class ReturnsFp32(Returning):
    def returned(self, out_TD, pending):
        return out_TD.float()


@breaks("two runs give different bits", "two_runs_give_the_same_bits")
class FalselyDeterministic(Returning):
    def returned(self, out_TD, pending):
        return out_TD * (1 + 2e-7 * torch.rand(out_TD.shape)).to(out_TD.dtype)


@breaks("tokens in another order get other outputs", "the_order_of_tokens_does_not_matter")
class LooksAtPlaces(Returning):
    def returned(self, out_TD, pending):
        return out_TD * torch.linspace(1.0, 1.0 + 1e-5, len(out_TD)).unsqueeze(1)
