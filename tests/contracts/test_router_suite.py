"""The suite of routers: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_routers as routers
from moefw.plugins.routers.forced import Forced
from moefw.plugins.routers.sinkhorn import Sinkhorn
from moefw.plugins.routers.topk import TopK
from moefw.testing.pool import RankPool
from moefw.testing.suites.router import RouterSuite

BROKEN: list[tuple[Any, str, str]] = [
    (routers.WritesInForward, "forward_and_backward_write_nothing", "writes last_load in forward"),
    (routers.WeighsDroppedChoices, "routings_have_the_shapes", "not zero where a choice is dropped"),
    (routers.LosesTheGradient, "gradients_are_the_slopes", "carry no gradient"),
    (routers.LosesTheTokens, "gradients_are_the_slopes", "gradient of the tokens is not the slope"),
    (routers.LooksAtOthers, "routing_looks_at_no_more", "depends on the other sequences"),
    (routers.LooksAtThePlace, "routing_looks_at_no_more", "depends on its place among the others"),
    (routers.LosesByMicroBatch, "routing_looks_at_no_more", "depends on how sequences are split"),
    (routers.CountsTheMask, "statistics_count_every_choice", "masked tokens left out"),
    (routers.SendsTheMask, "masked_tokens_go_nowhere", "sends masked tokens to experts"),
    (routers.AttachesTwice, "auxiliary_losses_are_attached_once", "is 2 times aux_scale"),
    (routers.ScalesByTheLoss, "auxiliary_losses_are_attached_once", "is 4 times aux_scale"),
    (routers.AttachesUnscaled, "auxiliary_losses_are_attached_in_training", "losses in evaluation"),
    (routers.DrawsByCall, "the_same_call_again", "differs when the same micro-batch is routed again"),
    (routers.IsBornAtRandom, "two_routers_compute", "differs between two equal routers"),
    (routers.ForgetsReplay, "recorded_routes_are_replayed", "does not replay Batch.routes"),
    (routers.ReplaysTheFirstLayer, "recorded_routes_are_replayed", "does not replay Batch.routes in layer 3"),
    (routers.TiesByChance, "equal_scores_are_told_apart", "draws from PyTorch's generator"),
    (routers.ScalesItsMetric, "metrics_do_not_depend", "aux_losses['z_loss'] changes with Batch.loss_scale"),
    (routers.HidesState, "update_depends_on", "writes bias, which state_spec() does not declare"),
    (routers.NamesStateThatIsNotThere, "declared_state", "has no buffer of that name"),
    (routers.UpdatesByHabit, "update_depends_on", "depends on more than the reduced statistics"),
    (routers.DropsAndCountsAfterwards, "statistics_count_every_choice", "dropped afterwards included"),
    (
        routers.DropsAndCountsAfterwards,
        "statistics_count_every_choice",
        "'top_k': 2, 'dim': 16, 'expert_dim': 16}, set",
    ),
    (routers.ChoosesTwice, "routings_have_the_shapes", "chooses the same expert twice"),
    (routers.MasksTheChoiceBefore, "routings_of_many_choices", "chooses the same expert twice"),
    (routers.LooksAtThePlaceInTheRow, "a_pack_is_routed", "in a pack of sequences of (4, 4) tokens the routing of a"),
    (routers.ForgetsTheBatch, "its_methods_take", "is called as __call__(x_TD, batch): too many positional arguments"),
    (routers.MisspellsItsPartition, "its_offers_are_values", "knows 'tokens'"),
    (routers.CountsInItsModule, "the_modules_of_its_package", "writes broken_routers.LOAD as it runs"),
    (routers.WeighsInHalf, "routings_have_the_shapes", "torch.float32 is right"),
    (routers.DividesByNoTokens, "no_tokens_and_one_token", "'z_loss'] is not finite"),
    (routers.CrowdsTheCrowded, "updates_do_not_make", "Is the sign of the update right?"),
    (routers.WeighsWithTheBias, "state_changes_no_weight", "the weights of the same choices depend on bias"),
    (routers.CountsMaskedRows, "statistics_count_every_choice", "choices are not -1"),
    (routers.LooksAtItsPart, "ranks_that_share_a_micro_batch", "share a micro-batch change expert_ids_TK, weights_TK"),
    (routers.LeansOnTheRank, "a_model_trains_on_two_ranks", "two ranks do not train like one"),
]
AUX = {"kind": "aux_loss", "coeff": 0.1}
BIAS, Z_LOSS = {"kind": "expert_bias"}, {"kind": "z_loss", "coeff": 0.01}


@pytest.mark.parametrize(("made", "check", "says"), BROKEN, ids=[f"{case[0].__name__}: {case[1]}" for case in BROKEN])
def test_what_is_broken_is_caught_and_named(must_catch: Callable[..., None], made: Any, check: str, says: str) -> None:
    must_catch(RouterSuite, routers.PLUGINS[made], check, says)


REPLAYED_WRONGLY: list[tuple[Any, str]] = [
    (routers.ReadsAValue, "a graph holds no wait of the host: "),
    (routers.CountsItsCalls, "On 1 ranks, a replayed step differs from an eager one: step 0: "),
]


@pytest.mark.parametrize(("made", "says"), REPLAYED_WRONGLY, ids=[case[0].__name__ for case in REPLAYED_WRONGLY])
def test_replays_that_are_offered_wrongly_are_caught(
    must_catch: Callable[..., None], moefw_counted_pool: RankPool, made: Any, says: str
) -> None:
    must_catch(RouterSuite, routers.PLUGINS[made], "steps_that_it_offers", says, _counted_pool=moefw_counted_pool)


@pytest.mark.parametrize("check", ["routings_have_the_shapes", "routing_looks_at_no_more"])
def test_a_router_that_needs_other_sizes_is_told_of_the_dims_of_its_suite(
    must_catch: Callable[..., None], check: str
) -> None:
    must_catch(RouterSuite, routers.NeedsAllExperts, check, "Set `dims` of the suite to sizes that fit.")


GROUPED = [
    (routers.PlainRouter, "a token uses 4 of 4 groups of experts, and 2 is the most."),
    (routers.KeepsOneGroupTooMany, "a token uses 3 of 4 groups of experts, and 2 is the most."),
    (routers.KeepsOneGroupTooFew, "uses more than 1 of 4 groups of experts, and 2 may be used."),
    (routers.KeepsTheFirstGroups, "uses the group 2 of 4: the groups of a token are its best."),
]
IN_GROUPS: Any = {"dims": {"num_experts": 16, "top_k": 4, "dim": 16, "expert_dim": 16}, "groups": (4, 2)}


@pytest.mark.parametrize(("made", "says"), GROUPED, ids=[case[0].__name__ for case in GROUPED])
def test_a_router_that_does_not_limit_tokens_to_groups_is_caught(
    must_catch: Callable[..., None], made: Any, says: str
) -> None:
    must_catch(RouterSuite, routers.PLUGINS[made], "a_token_uses_as_many", says, **IN_GROUPS)


class TestInGroups(RouterSuite):
    plugin = routers.PLUGINS[routers.InGroups]
    dims = IN_GROUPS["dims"]
    groups = IN_GROUPS["groups"]
    choices = ((16, 4),)


class TestPlainRouter(RouterSuite):
    plugin = routers.PLUGINS[routers.PlainRouter]


class TestReplays(RouterSuite):
    plugin = routers.PLUGINS[routers.Replays]


class TestSoftmax(RouterSuite):
    plugin = TopK
    options = {"balance": [AUX, Z_LOSS], "jitter": 0.1}


class TestSigmoid(RouterSuite):
    plugin = TopK
    options = {"score": "sigmoid", "balance": [BIAS, {**AUX, "over": "global_batch"}, Z_LOSS], "jitter": 0.2}


class TestOneOfAll(RouterSuite):
    plugin = TopK
    options = {"pre_softmax": True, "scale": 2.5, "dtype": "fp64"}
    dims = {"num_experts": 6, "top_k": 1, "dim": 8, "expert_dim": 16}


class TestGroups(RouterSuite):
    plugin = TopK
    options = {"score": "sqrtsoftplus", "groups": {"count": 4, "keep": 2}, "balance": [{**AUX, "over": "sequence"}]}
    groups = (4, 2)


class TestQuantile(RouterSuite):
    plugin = TopK
    options = {"balance": [{"kind": "quantile"}]}


class TestCapacity(RouterSuite):
    plugin = TopK
    options = {"score": "sigmoid", "capacity": {"factor": 0.7, "pad": True}, "balance": [AUX]}


class TestCapacityOverTheMicroBatch(RouterSuite):
    plugin = TopK
    options = {"capacity": {"factor": 0.7, "drop": "position", "over": "micro_batch"}, "balance": [AUX]}


class TestSinkhorn(RouterSuite):
    plugin = Sinkhorn
    options = {"z_loss": 0.1}


class TestForced(RouterSuite):
    plugin = Forced
