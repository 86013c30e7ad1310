"""The suite of adapters: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_adapters as adapters
from moefw.plugins.adapters.dora import Dora
from moefw.plugins.adapters.lora import Lora
from moefw.plugins.adapters.none import NoAdapter
from moefw.testing.suites.adapter import AdapterSuite

BROKEN: list[tuple[Any, str, str]] = [
    (adapters.ForgetsTheRows, "its_methods_take", "is called as __call__(x, out, weight, rows): too many positional"),
    (adapters.MergesNoOneExpert, "its_methods_take", "is called as merged(weight, expert): too many positional"),
    (adapters.IsNoModule, "its_methods_take", "it returns a StackOfNothing, and not a torch.nn.Module"),
    (adapters.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'allways'"),
    (adapters.AdaptsNothing, "it_adapts_weights", "so nothing trains"),
    (adapters.AdaptsNowAndThen, "it_adapts_weights", "if asked again"),
    (adapters.NeedsNothing, "a_part_that_multiplies", "Yield moefw.need('adapter', 'attention.q_proj', ...)"),
    (adapters.BeginsWithNoise, "a_new_adapter", "the product of attention.q_proj (20, 12)"),
    (adapters.ForgetsTheScaleInMerged, "products_are", "the output is not that of the merged weight"),
    (adapters.MergesTransposed, "products_are", "merged(W) fails with W (20, 12): RuntimeError"),
    (adapters.LosesTheScaleOfAFactor, "products_are", "the gradient of lora_A is not that of the merged weight"),
    (adapters.LosesTheGradientOfRows, "products_are", "the gradient of x is not that of the merged weight"),
    (adapters.ForgetsThatOutputsAreLeftOut, "products_are", "of whose outputs only slice(4, 10, None) are computed"),
    (adapters.ReturnsFp32, "products_are", "returns torch.float32"),
    (adapters.DropsUnsaid, "what_training_drops", "drops in training, but draws is False"),
    (adapters.DropsByThePartOfARow, "parts_of_a_weight", "the inputs of attention.q_proj split over two ranks of tp"),
    (adapters.DropsByTheCall, "what_training_drops", "the same rows drop otherwise in a second call"),
    (adapters.DropsByThePlace, "what_training_drops", "it depends on the place of a row"),
    (adapters.DropsTheSameAlways, "what_training_drops", "rows with other keys drop the same"),
    (adapters.DropsAndScalesNothingUp, "what_training_drops", "is not the product of evaluation"),
    (adapters.DropsInForwardAlone, "what_training_drops", "Does backward drop what forward dropped?"),
    (adapters.MakesTheMergedWeight, "nothing_of_the_size", "makes a tensor of 4,096 values beside a weight of 4,096"),
    (adapters.NamesAFactorTwice, "canonical_names", "yields lora_A twice"),
    (adapters.NamesAFactorAsTheOther, "canonical_names", "does not name every value of a, b once"),
    (adapters.NamesOneExpertAsAnother, "canonical_names", "are called layers.1.moe.experts.2.down_proj.lora_A"),
    (adapters.NamesWeightsOfAFolder, "canonical_names", "without an adapter_std"),
    (adapters.ForgetsItsWeight, "canonical_names", "Adapter.weight is not the AdaptedWeight that build() was given"),
    (adapters.ClaimsAShard, "canonical_names", "says lora_A is (16, 12) where outputs of attention.q_proj are split"),
    (adapters.ForgetsItsShard, "canonical_names", "says lora_B is (10, 8) where outputs"),
    (adapters.ForgetsItsShard, "parts_of_a_weight", "the outputs of attention.q_proj split over two ranks of tp"),
    (adapters.AddsTheWholeOnEachRank, "parts_of_a_weight", "the output is not that of one rank"),
    (adapters.CountsExpertsFromItsFirst, "a_stack_is", "merged(W, 2) of moe.experts.gate_up_proj"),
    (adapters.TellsAnotherScale, "a_stack_is", "is not W + scale b[0] a[0]"),
    (adapters.NamesStacksOtherwise, "a_stack_is", "differ in the names"),
    (adapters.KeepsRows, "it_keeps_nothing", "writes last in forward or backward"),
    (adapters.AddsIntoTheProduct, "it_keeps_nothing", "writes into the product"),
    (adapters.FreezesAFactor, "it_trains", "lora_A does not train"),
    (adapters.ScalesOnTheFirstRankAlone, "a_layout_changes", "under ep 2, step 0 has gradients of the norms"),
    (adapters.AddsTheWholeOnEachRank, "a_layout_changes", "under tp 2 and etp 2, step 0 has gradients of the norms"),
]
"""The class, the check, and a part of its message."""
OF_EXPERTS: list[tuple[Any, str, str]] = [
    (adapters.TellsAnotherScale, "experts_are_those", "grouped"),
    (adapters.AdaptsExpertsOtherwise, "experts_are_those", "loop"),
]
"""The class, the check, and the GEMM of the experts."""


@pytest.mark.parametrize(("made", "check", "says"), BROKEN, ids=[f"{case[0].__name__}: {case[1]}" for case in BROKEN])
def test_what_is_broken_is_caught_and_named(must_catch: Callable[..., None], made: Any, check: str, says: str) -> None:
    must_catch(AdapterSuite, adapters.PLUGINS[made], check, says)


@pytest.mark.parametrize(("made", "check", "gemm"), OF_EXPERTS, ids=[case[0].__name__ for case in OF_EXPERTS])
def test_what_is_broken_in_experts_is_caught_and_named(
    must_catch: Callable[..., None], made: Any, check: str, gemm: str
) -> None:
    must_catch(AdapterSuite, adapters.PLUGINS[made], check, f"is not that of merged weights: experts by {gemm}", gemm)


class TestPlain(AdapterSuite):
    plugin = adapters.PLUGINS[adapters.PlainAdapter]


@pytest.mark.deep
class TestDrops(AdapterSuite):
    plugin = adapters.PLUGINS[adapters.Drops]


@pytest.mark.deep
class TestLora(AdapterSuite):
    plugin = Lora


class TestLoraThatDrops(AdapterSuite):
    plugin = Lora
    options = {"dropout": 0.25, "rank": 8}


class TestDora(AdapterSuite):
    plugin = Dora
    options = {"rank": 6}


@pytest.mark.deep
class TestLoraOfExpertsAlone(AdapterSuite):
    plugin = Lora
    options = {"targets": ["moe.experts.*"], "rank": 8, "rslora": True}


class TestNone(AdapterSuite):
    plugin = NoAdapter
