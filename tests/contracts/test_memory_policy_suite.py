"""The suite of memory policies: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_memory_policies as policies
from moefw.plugins.memory.keep import Keep
from moefw.plugins.memory.offload import Offload
from moefw.plugins.memory.recompute import Recompute
from moefw.testing.suites.memory_policy import MemoryPolicySuite

BROKEN: list[tuple[Any, str, str]] = [
    (policies.RunsTwice, "a_region_runs_once", "runs a region 2 times in forward"),
    (policies.RunsTwiceInBackward, "a_region_runs_once", "2 times more in backward"),
    (policies.KeepsGradientsInHalf, "no_bit_changes", "other bits in the gradient of"),
    (policies.KeepsNestedGradientsInHalf, "all_regions", "other bits in the gradient of"),
    (policies.RecordsInEvaluation, "no_gradient_is_wanted", "changes what a region gives under no_grad"),
    (policies.SavesInHalf, "two_micro_batches_in_flight", "other bits in the gradient of"),
    (
        policies.SavesLargeTensorsInHalf,
        "large_tensors_come_back",
        "the gradient of x, the gradient of its factor has other",
    ),
    (policies.SavesVeryLargeTensorsInHalf, "large_tensors_come_back", "if tensors have 2,097,153 elements"),
    (policies.ForgetsWhereASliceBegins, "slices_of_one_storage", "the gradient of x has other bits if a region saves"),
    (policies.HoldsWhatIsComputedAgain, "what_a_region_inside", "holds 4,000 bytes of a tensor that a region inside"),
    (policies.LosesMoreThanItSays, "no_bit_changes", "gradients that are off by more than 1e-05 of"),
    (policies.LosesMoreThanItSays, "large_tensors_come_back", "is off by more than 1e-05 of its largest value"),
    (policies.LosesInForward, "no_bit_changes", "other bits in aux_losses"),
    (policies.KeepsItsGraphs, "what_a_region_makes_is_freed", "more after each run of a region, forward and backward"),
    (policies.KeepsCopies, "what_a_region_makes_is_freed", "holds 1,120,016 bytes more after each run of a region"),
    (policies.TreatsNothing, "what_a_region_makes_is_freed", "16,777,224 are held without it"),
    (policies.WrapsAnyRegion, "its_methods_take", "is called as wrap(region, function): too many positional arguments"),
    (policies.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'allways'"),
    (policies.NeedsElements, "tensors_without_elements", "fails on tensors without elements"),
    (policies.LosesStructures, "a_region_gets_what", "the gradient of a tensor in an argument"),
    (policies.ForgetsKeywords, "a_region_gets_what", "does not pass arguments or results on as they are"),
    (policies.KeepsOneFunction, "regions_are_told_apart", "the wrong one runs"),
    (policies.AttachesAgain, "auxiliary_losses_arrive_once", "2 times; once is right"),
    (policies.AcceptsAnything, "a_region_that_is_not_there", "accepts the region 'nowhere'"),
    (
        policies.FreesTheGraph,
        "no_bit_changes",
        "with layer treated, forward and backward fail: rank",
    ),
    (policies.FreesTheGraph, "large_tensors_come_back", "treated, forward and backward fail: Trying to backward"),
    (policies.PlansAgain, "counts_are_not_exchanged", "times instead of 4"),
]


@pytest.mark.parametrize(("plugin", "check", "says"), BROKEN, ids=[f"{case[0].name}: {case[1]}" for case in BROKEN])
def test_what_is_broken_is_caught_and_named(
    must_catch: Callable[..., None], plugin: Any, check: str, says: str
) -> None:
    must_catch(MemoryPolicySuite, plugin, check, says)


class TestHalf(MemoryPolicySuite):
    plugin = policies.Half


@pytest.mark.deep
class TestKeep(MemoryPolicySuite):
    plugin = Keep


class TestRecompute(MemoryPolicySuite):
    plugin = Recompute


@pytest.mark.deep
class TestRecomputeOfTheLoop(MemoryPolicySuite):
    plugin = Recompute
    regions = ("moe_act", "experts")
    parts = {"gemm": {"use": "loop"}, "precision": {"use": "bf16"}}


class TestOffload(MemoryPolicySuite):
    plugin = Offload
    options = {"min_bytes": 0}


@pytest.mark.deep
class TestOffloadOfTheLoop(MemoryPolicySuite):
    plugin = Offload
    options = {"min_bytes": 0, "fraction": 0.5}
    regions = ("moe_act", "experts")
    parts = {"gemm": {"use": "loop"}, "precision": {"use": "bf16"}}
