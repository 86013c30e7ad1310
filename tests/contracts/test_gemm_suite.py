"""The suite of GEMMs: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_gemms as gemms
from moefw.plugins.gemm.grouped import Grouped
from moefw.plugins.gemm.loop import Loop
from moefw.testing.pool import RankPool
from moefw.testing.suites.gemm import GemmSuite

BROKEN: list[tuple[Any, str, str]] = [
    (gemms.ForgetsTheRowWeight, "outputs_and_gradients", "fits if the row weights are left out"),
    (gemms.OverlooksPadding, "padding_gives_zero", "not that of the dense formula"),
    (gemms.LeavesPaddingAsItWas, "padding_gives_zero", "rows that pad a group do not give zero"),
    (gemms.SwapsGateAndUp, "outputs_and_gradients", "gate_proj and up_proj the wrong way round"),
    (gemms.LosesTheWeightGradient, "outputs_and_gradients", "gradient of row_weights is not that"),
    (gemms.ForgetsFullTiles, "outputs_and_gradients", "The groups have 31, 32, 33, 64 rows."),
    (gemms.ZeroesPadding, "what_experts_are_given", "writes into rows_RD in forward or backward"),
    (gemms.KeepsTheRows, "forward_and_backward_write_nothing", "writes last in forward or backward"),
    (gemms.ReadsTheTail, "rows_behind_the_last_group", "reads rows behind the last group"),
    (gemms.NumbersItsOwn, "canonical_names_every", "yields 0.down_proj.weight"),
    (gemms.NamesAValueTwice, "canonical_names_every", "does not name every value of up once"),
    (gemms.ForgetsThatItIsAPart, "canonical_names_every", "(32, 16) is right"),
    (gemms.AveragesParts, "parts_of_experts_add_up", "experts in two parts added up: the output is not"),
    (gemms.KnowsNoRegion, "promised_regions", "Is context.region('moe_act', ...) used?"),
    (gemms.CountsOnTheHost, "counts_on_the_host", "fails without counts_host"),
    (gemms.ForgetsThePasses, "operands_are_quantized_for_each_pass", "has 0 values quantized as role grad"),
    (gemms.NamesNoProduct, "each_product_has", "the module's recipe multiplies. Give each GEMM its own recipe"),
    (gemms.NamesOneProduct, "each_product_has", "but 'experts' serves several GEMMs"),
    (gemms.NamesTwoWeightsAsOne, "each_product_has", "but 'gate_up' serves several GEMMs"),
    (gemms.CutsLongGroupsShort, "outputs_and_gradients", "64, 128, 300"),
    (gemms.SumsOneTile, "large_products", "The experts map 304 columns to 200, and back."),
    (gemms.ForgetsTheKeys, "the_recipe_is_told_the_keys", "has 0 values of gradients rounded by keys"),
    (gemms.LeavesItForBackward, "two_batches_in_flight", "with two batches in flight"),
    (gemms.ForgetsEarlierMicroBatches, "micro_batches_of_a_step", "over two micro-batches of a step is off by"),
    (gemms.LosesLateGradients, "weight_gradients_may_be", "change if weight gradients are computed later"),
    (gemms.RoundsAtRandom, "the_same_rows_give", "gives other bits of out"),
    (gemms.ForgetsToClamp, "outputs_and_gradients", "the output is not that of the dense formula"),
    (gemms.ForgetsBiases, "canonical_names_every", "does not yield 0.down_proj.bias"),
    (gemms.MultipliesWeightsAsTheyAre, "frozen_weights_get", "fails if its weights are frozen (RuntimeError: "),
    (gemms.OffersAdaptersAlone, "products_with_adapters", "offers the adapter moe.experts.gate_up_proj, but asks for"),
    (gemms.IgnoresAdaptersOfDown, "products_with_adapters", "the output is not that of the dense formula"),
    (gemms.ExchangesGateAndUpOfAdapters, "products_with_adapters", "with adapters merged into the weights"),
    (gemms.NamesNoAdapters, "products_with_adapters", "does not name the parameters of the adapter"),
    (gemms.AdaptsForgettingTheRowWeight, "products_with_adapters", "with adapters merged into the weights"),
    (gemms.ForgetsTheShardsOfAdapters, "parts_of_experts_with", "ranks of etp, asks for an adapter of 0.gate_proj"),
    (
        gemms.TakesAScale,
        "its_methods_take",
        "is called as __call__(batch): missing a required argument: 'scale'. Give it the arguments of ExpertGemm.",
    ),
    (gemms.CountsInItsModule, "the_modules_of_its_package", "writes broken_gemms._SEEN"),
    (gemms.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'biass'"),
    (gemms.MisspellsAMechanism, "its_offers_are_values", "for 'recompte'. Did you mean 'recompute'?"),
    (gemms.ReturnsHalf, "outputs_and_gradients", "torch.float32 is right"),
]


@pytest.mark.parametrize(("made", "check", "says"), BROKEN, ids=[f"{case[0].__name__}: {case[1]}" for case in BROKEN])
def test_what_is_broken_is_caught_and_named(must_catch: Callable[..., None], made: Any, check: str, says: str) -> None:
    must_catch(GemmSuite, gemms.PLUGINS[made], check, says)


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        (gemms.BuildsNothing, "(distribution this test 0) has no build(). Write one that returns a moefw.ExpertGemm."),
        (gemms.BuildsWithoutAContext, "is called as build(context): too many positional arguments"),
        (gemms.AsksWithoutASite, "is called as needs(site): too many positional arguments"),
        (gemms.BuildsALayer, "build(): it returns a Linear, and not a moefw.ExpertGemm."),
    ],
)
def test_a_plugin_that_builds_no_experts_is_told_so(must_catch: Callable[..., None], plugin: Any, says: str) -> None:
    must_catch(GemmSuite, plugin, "its_methods_take", says)


def test_replays_that_are_offered_by_experts_that_read_offsets_are_caught(
    must_catch: Callable[..., None], moefw_counted_pool: RankPool
) -> None:
    says = "On 1 ranks, a step cannot be captured as a graph: a graph holds no wait of the host"
    plugin = gemms.PLUGINS[gemms.OffersReplays]
    must_catch(GemmSuite, plugin, "steps_that_it_offers", says, _counted_pool=moefw_counted_pool)


class TestPlainGemm(GemmSuite):
    plugin = gemms.Plain


class TestAdaptedGemm(GemmSuite):
    plugin = gemms.PLUGINS[gemms.AdaptedExperts]


class TestGrouped(GemmSuite):
    plugin = Grouped


class TestLoop(GemmSuite):
    plugin = Loop
