"""More dispatchers that are broken on purpose: gradients, inputs, the wire, declarations and layouts."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

import broken_dispatchers
import moefw
from broken_dispatchers import Arriving, Returning, ScaledGradient, Wrapper, WrongOrder, breaks, changed
from moefw.plugins.dispatchers.budget import Budget
from moefw.plugins.dispatchers.hybridep.torch_backend import TorchHybridEP
from moefw.testing.profiles import PROFILES

# Gradients.


@breaks("the gradient of the routing weights is lost", "weights_alone_and_tokens_alone_get_their_gradients")
class LosesTheGradientOfWeights(Wrapper):
    def start_dispatch(self, x_TD, weights_TK, plan):
        return super().start_dispatch(x_TD, weights_TK.detach(), plan)


@breaks(
    "is wrong: the rows that stay on the rank are missing",
    "gradients_of_tokens_and_weights_are_the_true_ones",
    worlds=(2,),
)
class LosesGradientsOfItsOwnRows(Arriving):
    def start_dispatch(self, x_TD, weights_TK, plan):
        self.x_TD = x_TD.detach()
        return super().start_dispatch(x_TD, weights_TK, plan)

    def arrived(self, batch):
        own_R = (batch.rows_RD.detach().unsqueeze(1) == self.x_TD).all(-1).any(-1, keepdim=True)
        return changed(batch, rows_RD=ScaledGradient.apply(batch.rows_RD, lambda grad: (~own_R).to(grad.dtype)))


@breaks("rows of expert", "rows_get_the_gradients_of_their_tokens_outputs")
class ScalesTheGradientOfRows(Wrapper):
    def start_combine(self, rows_RD, handle):
        return super().start_combine(ScaledGradient.apply(rows_RD, lambda grad: 0.5), handle)


@breaks("under torch.no_grad the rows want gradients", "without_gradients_nothing_is_saved_and_nothing_changes")
class RecordsUnderNoGrad(Wrapper):
    @torch.enable_grad()
    def start_dispatch(self, x_TD, weights_TK, plan):
        return super().start_dispatch(x_TD, weights_TK, plan)

    @torch.enable_grad()
    def finish_dispatch(self, pending):
        return super().finish_dispatch(pending)


@breaks("under torch.no_grad", "without_gradients_nothing_is_saved_and_nothing_changes")
class WrongInEvaluation(Returning):
    def returned(self, out_TD, pending):
        return out_TD if torch.is_grad_enabled() else out_TD * 2


@breaks("float32, not bf16", "rows_of_keys_are_redispatched_bit_for_bit", offers={"row_keys": True})
class RedispatchesInFp32(Wrapper):
    def start_redispatch(self, x_TD, weights_TK, handle):
        return super().start_redispatch(x_TD.float(), weights_TK, handle)


# Inputs.


@breaks("was changed in place", "inputs_are_left_as_they_are")
class ChangesTokensInPlace(Wrapper):
    def start_dispatch(self, x_TD, weights_TK, plan):
        pending = super().start_dispatch(x_TD, weights_TK, plan)
        x_TD.data.mul_(2)
        return pending


@breaks("views and contiguous tensors", "inputs_may_be_views")
class ReadsMemoryInARow(Wrapper):
    def start_dispatch(self, x_TD, weights_TK, plan):
        as_if = torch.as_strided(x_TD.detach(), x_TD.shape, (x_TD.shape[1], 1)) if x_TD.stride(0) == 1 else x_TD
        return super().start_dispatch(as_if + (x_TD - x_TD.detach()), weights_TK, plan)


# The wire.


@breaks("do not make the same collectives", "every_rank_makes_the_same_collectives", worlds=(2,))
class EmptyRanksStayAway(Wrapper):
    def plan(self, routing, **given):
        if self.experts.group is not None and (routing.expert_ids_TK >= 0).any():
            dist.all_reduce(torch.zeros(1), group=self.experts.group)
        return super().plan(routing, **given)


@breaks("the ranks hang", "the_layer_equals_the_oracle", worlds=(2,))
class HangsAmongProcesses(Wrapper):
    def plan(self, routing, **given):
        if dist.is_initialized() and self.experts.group is not None and self.experts.rank == 0:
            dist.all_reduce(torch.zeros(1), group=self.experts.group)
        return super().plan(routing, **given)


@breaks("the ranks disagree about what they send", "every_rank_makes_the_same_collectives", worlds=(2,))
class SendsAnotherDtypeOnOneRank(Wrapper):
    def plan(self, routing, **given):
        if self.experts.group is not None:
            values = torch.zeros(self.experts.size, dtype=(torch.int32, torch.int64)[self.experts.rank % 2])
            dist.all_to_all_single(torch.empty_like(values)[:0], values[:0], [0, 0], [0, 0], group=self.experts.group)
        return super().plan(routing, **given)


@breaks("a buffer is read before", "no_buffer_is_read_before_its_collective_is_awaited", worlds=(2,))
class ReadsTooEarly(Wrapper):
    def start_dispatch(self, x_TD, weights_TK, plan):
        pending = super().start_dispatch(x_TD, weights_TK, plan)
        self.peek = pending.buffers[0].detach().sum() * 0
        return pending

    def finish_dispatch(self, pending):
        batch, handle = super().finish_dispatch(pending)
        return changed(batch, rows_RD=batch.rows_RD + self.peek), handle


@breaks("is overwritten before it was awaited", "no_buffer_is_read_before_its_collective_is_awaited", worlds=(2,))
class OverwritesWhatItSends(Wrapper):
    def start_dispatch(self, x_TD, weights_TK, plan):
        pending = super().start_dispatch(x_TD, weights_TK, plan)
        if pending.flight is not None:
            pending.flight.out.sent[0].data.zero_()
        return pending


class Kept:
    """No pytree: what is in it is not seen."""

    def __init__(self, detail, x_TD):
        self.detail, self.x_TD = detail, x_TD


@breaks("as a scheduler runs them", "a_scheduler_can_cut_the_graph_of_a_movement")
class HidesATensorInItsDetail(Wrapper):
    def start_dispatch(self, x_TD, weights_TK, plan):
        pending = super().start_dispatch(x_TD, weights_TK, plan)
        return replace(pending, detail=Kept(pending.detail, x_TD))

    def finish_dispatch(self, pending):
        hidden = pending.detail
        batch, handle = super().finish_dispatch(replace(pending, detail=hidden.detail))
        return changed(batch, rows_RD=batch.rows_RD + hidden.x_TD.sum()), handle


@breaks("it waits, so nothing overlaps", "movements_are_under_way_between_start_and_finish", worlds=(2,))
class WaitsInStart(Wrapper):
    def start_dispatch(self, x_TD, weights_TK, plan):
        return super().finish_dispatch(super().start_dispatch(x_TD, weights_TK, plan))

    def finish_dispatch(self, pending):
        return pending


@breaks("finish's backward does not start the dual", "movements_are_under_way_between_start_and_finish", worlds=(2,))
class MovesInOneNode(Wrapper):
    def start_combine(self, rows_RD, handle):
        pending = super().start_combine(rows_RD.detach(), handle)
        return (pending, rows_RD, handle)

    def finish_combine(self, pending):
        flying, rows_RD, handle = pending
        out_TD = super().finish_combine(flying)
        return OneNode.apply(rows_RD, out_TD, lambda rows: super(MovesInOneNode, self).start_combine(rows, handle),
                             super().finish_combine)  # fmt: skip


class OneNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, out_TD, start, finish):
        ctx.way = start, finish, rows_RD.shape
        return out_TD.detach()

    @staticmethod
    def backward(ctx, grad_TD):
        start, finish, shape = ctx.way
        with torch.enable_grad():
            rows_RD = torch.zeros(shape, dtype=grad_TD.dtype, requires_grad=True)
            out_TD = finish(start(rows_RD))
        return torch.autograd.grad(out_TD, rows_RD, grad_TD)[0], None, None, None


@breaks("exchanges metadata again", "redispatch_exchanges_no_metadata", worlds=(2,))
class RedispatchPlansAgain(Wrapper):
    def plan(self, routing, **given):
        plan = super().plan(routing, **given)
        self.routing = routing
        return plan

    def start_dispatch(self, x_TD, weights_TK, plan):
        return super().start_dispatch(x_TD, weights_TK, plan)

    def start_redispatch(self, x_TD, weights_TK, handle):
        return self.start_dispatch(x_TD, weights_TK, super().plan(self.routing))


@breaks("is not a dispatch of them", "redispatch_moves_other_values_along_the_same_way")
class RedispatchForgetsWeights(Wrapper):
    def start_redispatch(self, x_TD, weights_TK, handle):
        return self.start_dispatch(x_TD, weights_TK.detach(), handle)


@breaks(
    "did not come to expert",
    "rows_come_in_order_of_expert_source_rank_and_token",
    worlds=PROFILES["quick"].worlds,
)
class KnowsPowersOfTwo(Arriving):
    """As if ranks exchanged in floor(log2(ranks)) rounds: among 3, rows of some ranks do not come."""

    def arrived(self, batch):
        num_reached = 2 ** (self.experts.size.bit_length() - 1)
        return batch if num_reached == self.experts.size else changed(batch, rows_RD=batch.rows_RD * 0)


# Declarations and layouts.

ARGUMENTS = "its_methods_take_and_return_what_the_contract_says"


@breaks("is called as plan(routing, counts=..., dropless=...): got an unexpected keyword argument", ARGUMENTS)
class KnowsNoDropless(Wrapper):
    def plan(self, routing, counts=None):
        return super().plan(routing, counts=counts)


@breaks("returns IsNoDispatcher, and not a moefw.Dispatcher", ARGUMENTS)
class IsNoDispatcher:
    def __init__(self, experts, row_alignment):
        pass


@breaks("start_combine(rows_RD, handle): missing a required argument: 'out_TD'", ARGUMENTS)
class AsksForTheOutput(Wrapper):
    def start_combine(self, rows_RD, handle, out_TD):
        return super().start_combine(rows_RD, handle)


@breaks("finish_dispatch returns ExpertBatch, and not a tuple of an ExpertBatch and a handle", ARGUMENTS)
class ReturnsNoHandle(Wrapper):
    def finish_dispatch(self, pending):
        return super().finish_dispatch(pending)[0]


@breaks("finish_combine returns tuple of Tensor, NoneType, and not a Tensor", ARGUMENTS)
class ReturnsATuple(Wrapper):
    def finish_combine(self, pending):
        return super().finish_combine(pending), None


@breaks(
    "of which no part knows 'paded'. Did you mean 'padded'?",
    "its_offers_are_values_that_parts_may_need",
    offers={"rows": ("ragged", "paded")},
)
class MisspellsAnOffer(Wrapper):
    pass


@breaks("offers repeats='no'", "its_offers_are_values_that_parts_may_need", offers={"repeats": "no"})
class OffersATextForABool(Wrapper):
    pass


ASKED = [0]


def _fickle(self, site):
    ASKED[0] += 1
    return moefw.offers(row_alignment=moefw.ANY, rows=("ragged",), counts=("host", "device")[: ASKED[0] % 2 + 1])


class Fickle(Wrapper):
    plugin_offers = _fickle


breaks("returns something else when it is asked again", "it_can_be_built_and_its_declaration_is_pure")(Fickle)


@breaks("dropless is ignored", "a_static_budget_holds_whatever_the_routing", offers={"rows": ("static",)})
class IgnoresDropless(Wrapper):
    def built(self):
        return TorchHybridEP(self.experts, row_alignment=self.row_alignment, budget=Budget(0.5, "drop"))

    def plan(self, routing, *, counts=None, dropless=False):
        return self.inner.plan(routing)


@breaks("stats say that 0 were left out", "a_static_budget_holds_whatever_the_routing", offers={"rows": ("static",)})
class SaysNothingOfOverflow(Arriving):
    def built(self):
        return TorchHybridEP(self.experts, row_alignment=self.row_alignment, budget=Budget(0.5, "drop"))

    def arrived(self, batch):
        return changed(batch, stats={})


@breaks("there are [", "a_static_budget_holds_whatever_the_routing", offers={"rows": ("static",)})
class FalselyStatic(Wrapper):
    pass


@breaks("differs from the oracle", "the_layer_equals_the_oracle_with_copies_of_experts", worlds=(2, 4))
class WrongInASecondExpertGroup(Returning):
    def returned(self, out_TD, pending):
        return out_TD * 2 if dist.is_initialized() and dist.get_rank() >= self.experts.size else out_TD


@breaks("differs from the oracle", "the_layer_equals_the_oracle", worlds=(2,))
class WrongAmongProcesses(Returning):
    def returned(self, out_TD, pending):
        return out_TD * 1.1 if dist.is_initialized() else out_TD


@breaks("refuses every world", "it_can_be_built_and_its_declaration_is_pure")
class RefusesEverything(Wrapper):
    pass


broken_dispatchers.BROKEN["RefusesEverything"].plugin.needs = lambda self, site: [
    moefw.need("axis", "nowhere", reason="it runs over an axis that no layout has")
]


@breaks("torch.get_rng_state() changed", "nothing_on_the_dispatcher_changes_between_calls")
class DrawsRandomNumbers(Wrapper):
    def plan(self, routing, **given):
        torch.rand(1)
        return super().plan(routing, **given)


@breaks("not moved bit for bit", "rows_are_moved_bit_for_bit_whatever_they_hold")
class MendsNaN(Wrapper):
    def start_dispatch(self, x_TD, weights_TK, plan):
        return super().start_dispatch(x_TD.nan_to_num(), weights_TK, plan)


class RealRanks(Wrapper):
    """A correct dispatcher that asks ``torch.distributed`` for its rank, so it cannot run on threads."""

    def plan(self, routing, **given):
        if self.experts.group is not None:
            assert dist.get_rank(self.experts.group) == self.experts.rank
        return super().plan(routing, **given)


@breaks("came in the order", "rows_come_in_order_of_expert_source_rank_and_token", worlds=(2,))
class WrongOrderOnRealRanks(RealRanks, WrongOrder):
    pass


@breaks(
    "each plan opens 1 process group, by torch.distributed.new_group", "no_group_is_opened_in_a_movement", worlds=(2,)
)
class RealRanksOpenAGroupInEachPlan(RealRanks):
    def plan(self, routing, **given):
        if self.experts.group is not None:
            dist.new_group(self.experts.ranks)
        return super().plan(routing, **given)


@breaks("raises", "rows_come_in_order_of_expert_source_rank_and_token", worlds=(2,))
class FailsOnRealRanks(RealRanks):
    def start_combine(self, rows_RD, handle):
        raise ZeroDivisionError("on purpose")


breaks("", "rows_come_in_order_of_expert_source_rank_and_token")(RealRanks)
ON_REAL_RANKS = broken_dispatchers.BROKEN.pop("RealRanks")
