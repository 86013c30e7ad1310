"""Contract suites: built-in plugins pass them, and plugins that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import broken_gemms as gemms
import broken_parts as parts
import broken_recipes as recipes
import broken_routers as routers
from moefw.plugins.gemm.grouped import Grouped
from moefw.plugins.gemm.loop import Loop
from moefw.plugins.memory.keep import Keep
from moefw.plugins.memory.offload import Offload
from moefw.plugins.memory.recompute import Recompute
from moefw.plugins.parallel.coupled import Coupled
from moefw.plugins.parallel.folded import Folded
from moefw.plugins.precision.native import BF16, FP32
from moefw.plugins.precision.quantized import MXFP8, NVFP4, FP8Blockwise, FP8Tensor
from moefw.plugins.routers.forced import Forced
from moefw.plugins.routers.sinkhorn import Sinkhorn
from moefw.plugins.routers.topk import TopK
from moefw.testing.pool import RankPool
from moefw.testing.suites.base import Profile, Suite
from moefw.testing.suites.gemm import GemmSuite
from moefw.testing.suites.layout import LayoutSuite
from moefw.testing.suites.memory import MemorySuite
from moefw.testing.suites.precision import PrecisionSuite
from moefw.testing.suites.router import RouterSuite

BROKEN: list[tuple[type[Suite], Any, str, str]] = [
    (RouterSuite, routers.WritesInForward, "forward_and_backward_write_nothing", "writes last_load in forward"),
    (RouterSuite, routers.AdvancesStateInForward, "forward_and_backward_write_nothing", "writes bias in forward"),
    (RouterSuite, routers.WeighsDroppedChoices, "routings_have_the_shapes", "not zero where a choice is dropped"),
    (RouterSuite, routers.LosesTheGradient, "gradients_are_the_slopes", "carry no gradient"),
    (RouterSuite, routers.LosesTheTokens, "gradients_are_the_slopes", "gradient of the tokens is not the slope"),
    (RouterSuite, routers.LooksAtOthers, "routing_looks_at_no_more", "depends on the other sequences"),
    (RouterSuite, routers.LooksAtThePlace, "routing_looks_at_no_more", "depends on its place among the others"),
    (RouterSuite, routers.LosesByMicroBatch, "routing_looks_at_no_more", "depends on how sequences are split"),
    (RouterSuite, routers.CountsTheMask, "statistics_count_every_choice", "masked tokens left out"),
    (RouterSuite, routers.SendsTheMask, "masked_tokens_go_nowhere", "sends masked tokens to experts"),
    (RouterSuite, routers.AttachesTwice, "auxiliary_losses_are_attached_once", "is 2 times loss_scale"),
    (RouterSuite, routers.AttachesUnscaled, "auxiliary_losses_are_attached_once", "is 2 times loss_scale"),
    (RouterSuite, routers.AttachesUnscaled, "auxiliary_losses_are_attached_in_training", "losses in evaluation"),
    (RouterSuite, routers.DrawsByCall, "the_same_call_again", "differs when the same micro-batch is routed again"),
    (RouterSuite, routers.IsBornAtRandom, "two_routers_compute", "differs between two equal routers"),
    (RouterSuite, routers.ForgetsReplay, "recorded_routes_are_replayed", "does not replay Batch.routes"),
    (RouterSuite, routers.HidesState, "update_depends_on", "writes bias, which state_spec() does not declare"),
    (RouterSuite, routers.NamesStateThatIsNotThere, "declared_state", "has no buffer of that name"),
    (RouterSuite, routers.UpdatesByHabit, "update_depends_on", "depends on more than the reduced statistics"),
    (RouterSuite, routers.DropsAndCountsAfterwards, "statistics_count_every_choice", "dropped afterwards included"),
    (RouterSuite, routers.ChoosesTwice, "routings_have_the_shapes", "chooses the same expert twice"),
    (RouterSuite, routers.WeighsInHalf, "routings_have_the_shapes", "torch.float32 is right"),
    (RouterSuite, routers.DividesByNoTokens, "no_tokens_and_one_token", "'z_loss'] is not finite"),
    (RouterSuite, routers.LeansOnTheRank, "a_model_trains_on_two_ranks", "two ranks do not train like one"),
    (GemmSuite, gemms.ForgetsTheRowWeight, "outputs_and_gradients", "fits if the row weights are left out"),
    (GemmSuite, gemms.OverlooksPadding, "padding_gives_zero", "not that of the dense formula"),
    (GemmSuite, gemms.LeavesPaddingAsItWas, "padding_gives_zero", "rows that pad a group do not give zero"),
    (GemmSuite, gemms.SwapsGateAndUp, "outputs_and_gradients", "gate_proj and up_proj the wrong way round"),
    (GemmSuite, gemms.LosesTheWeightGradient, "outputs_and_gradients", "gradient of row_weights is not that"),
    (GemmSuite, gemms.LosesAParameter, "outputs_and_gradients", "down_proj.weight is not that"),
    (GemmSuite, gemms.KeepsTheRows, "forward_and_backward_write_nothing", "writes last in forward or backward"),
    (GemmSuite, gemms.ReadsTheTail, "rows_behind_the_last_group", "reads rows behind the last group"),
    (GemmSuite, gemms.NumbersItsOwn, "canonical_names_every", "yields 0.down_proj.weight"),
    (GemmSuite, gemms.LeavesOutAnExpert, "canonical_names_every", "does not yield 0.down_proj.weight"),
    (GemmSuite, gemms.NamesAValueTwice, "canonical_names_every", "does not name every value of up once"),
    (GemmSuite, gemms.ForgetsThatItIsAPart, "canonical_names_every", "(32, 16) is right"),
    (GemmSuite, gemms.AveragesParts, "parts_of_experts_add_up", "experts in two parts added up: the output is not"),
    (GemmSuite, gemms.KnowsNoRegion, "promised_regions", "Is context.region('moe_act', ...) used?"),
    (GemmSuite, gemms.CountsOnTheHost, "counts_on_the_host", "fails without counts_host"),
    (GemmSuite, gemms.ForgetsThePasses, "operands_are_quantized_for_each_pass", "has 0 values quantized as role grad"),
    (GemmSuite, gemms.ForgetsTheKeys, "the_recipe_is_told_the_keys", "has 0 values of gradients rounded by keys"),
    (GemmSuite, gemms.LeavesItForBackward, "two_batches_in_flight", "with two batches in flight"),
    (GemmSuite, gemms.RoundsAtRandom, "the_same_rows_give", "differs in a second run"),
    (GemmSuite, gemms.ReturnsHalf, "outputs_and_gradients", "torch.float32 is right"),
    (MemorySuite, parts.RunsTwice, "a_region_runs_once", "runs a region 2 times in forward"),
    (MemorySuite, parts.RunsTwiceInBackward, "a_region_runs_once", "2 times more in backward"),
    (MemorySuite, parts.KeepsGradientsInHalf, "no_bit_changes", "other bits in the gradient of"),
    (MemorySuite, parts.SavesInHalf, "two_micro_batches_in_flight", "other bits in the gradient of"),
    (MemorySuite, parts.LosesStructures, "a_region_gets_what", "the gradient of a tensor in an argument"),
    (MemorySuite, parts.ForgetsKeywords, "a_region_gets_what", "does not pass arguments or results on as they are"),
    (MemorySuite, parts.KeepsOneFunction, "regions_are_told_apart", "the wrong one runs"),
    (MemorySuite, parts.AttachesAgain, "auxiliary_losses_arrive_once", "2 times; once is right"),
    (MemorySuite, parts.AcceptsAnything, "a_region_that_is_not_there", "accepts the region 'nowhere'"),
    (MemorySuite, parts.PlansAgain, "counts_are_not_exchanged", "times instead of 4"),
    (LayoutSuite, parts.Overlapping, "groups_partition_the_world", "groups overlap"),
    (LayoutSuite, parts.Backwards, "groups_are_the_ranks", "in ascending order"),
    (LayoutSuite, parts.Miscounted, "the_sizes_of_each_mesh", "do not multiply to"),
    (LayoutSuite, parts.Crowded, "coordinates_give_every_rank", "have the same place in"),
    (LayoutSuite, parts.Transposed, "groups_are_the_ranks", "by coordinates it is"),
    (LayoutSuite, parts.Curt, "a_world_fits_or_is_refused", "with ValueError: no"),
    (LayoutSuite, parts.Wasteful, "a_world_fits_or_is_refused", "ranks when asked for"),
    (LayoutSuite, parts.Wasteful, "the_smallest_world", "are the fewest, and arranges"),
    (LayoutSuite, parts.Slow, "4096_ranks", "s is allowed"),
    (LayoutSuite, parts.Scattered, "in_an_expert_group", "ranks of one position are neighbours"),
    (LayoutSuite, parts.Uneven, "copies_are_rows", "rows are of unequal length"),
    (LayoutSuite, parts.Forgetful, "copies_are_rows", "together they are"),
    (LayoutSuite, parts.Selfish, "copies_are_rows", "of them says"),
    (LayoutSuite, parts.BackwardRows, "copies_are_rows", "ranks ascend along a row"),
    (LayoutSuite, parts.BackwardCopies, "copies_are_rows", "and from row to row in one place"),
    (LayoutSuite, parts.OpensAgain, "opened_groups", "are the same ranks and have two groups"),
    (LayoutSuite, parts.OpensOthers, "opened_groups", "is this rank alone, and should be None"),
    (LayoutSuite, parts.HasNoNodes, "opened_groups", "ranks_per_node is 0"),
    (PrecisionSuite, recipes.Rounds, "operands_are_close", "off by"),
    (PrecisionSuite, recipes.Rounds, "a_layer_stays_close", "of a layer of 13 tokens is off by"),
    (PrecisionSuite, recipes.OffersAnother, "operands_have_the_shape", "torch.float32 is what the recipe offers"),
    (PrecisionSuite, recipes.OffersWhatNobodyTakes, "a_gemm_takes", "offers operands that no GEMM takes"),
    (PrecisionSuite, recipes.Detaches, "gradients_flow", "no gradient flows through an operand (role weight"),
    (PrecisionSuite, recipes.ScalesTheGradient, "gradients_flow", "not that of the identity"),
    (PrecisionSuite, recipes.Flattens, "operands_have_the_shape", "the shape must stay"),
    (PrecisionSuite, recipes.NeedsStrides, "operands_have_the_shape", "fails on"),
    (PrecisionSuite, recipes.NeedsRows, "operands_have_the_shape", "fails on (0,"),
    (PrecisionSuite, recipes.RoundsByChance, "the_same_tensor", "has other bits the second time"),
    (PrecisionSuite, recipes.RemembersTheLargest, "quantize_writes_nothing", "in quantize. A recipe keeps nothing"),
    (PrecisionSuite, recipes.WritesIntoTheTensor, "quantize_writes_nothing", "writes into the tensor"),
    (
        PrecisionSuite,
        recipes.KeepsAnother,
        "what_is_kept",
        "makes an operand off by",
    ),
    (PrecisionSuite, recipes.TurnsOneOfTwo, "operands_of_the_weight_gradient", "the product of its operands, is off"),
    (PrecisionSuite, recipes.KeepsLess, "what_is_kept", "the shape must stay"),
    (PrecisionSuite, recipes.FlowsInWholeNumbers, "the_residual_dtype", "residual_dtype is torch.int8"),
]
LAYOUTS: dict[str, Any] = {
    "drawn": st.just({"dense": {"shard": 2}, "experts": {"ep": 2, "etp": 3}}),
    "opened": [{"experts": {"ep": 2}}],
}


@pytest.fixture
def first_failure_is_enough(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No search for the smallest example, and the same examples every time: no draw decides what is caught."""
    monkeypatch.setenv("CI", "true")
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("first", phases=[hypothesis.Phase.generate], report_multiple_bugs=False)
    hypothesis.settings.load_profile("first")
    yield
    hypothesis.settings.load_profile(before)


@pytest.mark.usefixtures("first_failure_is_enough")
@pytest.mark.parametrize(
    ("suite", "plugin", "check", "says"), BROKEN, ids=[f"{case[1].name}: {case[2]}" for case in BROKEN]
)
def test_what_is_broken_is_caught_and_named(
    moefw_pool: RankPool, moefw_profile: Profile, suite: type[Suite], plugin: Any, check: str, says: str
) -> None:
    on_trial: Any = type("OnTrial", (suite,), {"plugin": plugin, **(LAYOUTS if suite is LayoutSuite else {})})()
    on_trial.pool, on_trial.profile = moefw_pool, moefw_profile
    (name,) = [name for name in dir(on_trial) if name.startswith(f"test_{check}")]
    with pytest.raises(AssertionError) as caught:
        getattr(on_trial, name)()
    assert says in str(caught.value)
    assert str(caught.value).startswith(plugin.name)


class TestPlainRouter(RouterSuite):
    plugin = routers.Plain


AUX = {"kind": "aux_loss", "coeff": 0.1}
BIAS, Z_LOSS = {"kind": "expert_bias"}, {"kind": "z_loss", "coeff": 0.01}


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


class TestQuantile(RouterSuite):
    plugin = TopK
    options = {"balance": [{"kind": "quantile"}]}


class TestCapacity(RouterSuite):
    plugin = TopK
    options = {"score": "sigmoid", "capacity": {"factor": 0.7, "pad": True}, "balance": [AUX]}


class TestSinkhorn(RouterSuite):
    plugin = Sinkhorn
    options = {"z_loss": 0.1}


class TestForced(RouterSuite):
    plugin = Forced


class TestPlainGemm(GemmSuite):
    plugin = gemms.Plain


class TestGrouped(GemmSuite):
    plugin = Grouped


class TestLoop(GemmSuite):
    plugin = Loop


class TestKeep(MemorySuite):
    plugin = Keep


class TestRecompute(MemorySuite):
    plugin = Recompute


class TestRecomputeOfTheLoop(MemorySuite):
    plugin = Recompute
    regions = ("moe_act", "experts")
    parts = {"gemm": {"use": "loop"}, "precision": {"use": "bf16"}}


class TestOffload(MemorySuite):
    plugin = Offload
    options = {"min_bytes": 0}


class TestOffloadOfTheLoop(MemorySuite):
    plugin = Offload
    options = {"min_bytes": 0, "fraction": 0.5}
    regions = ("moe_act", "experts")
    parts = {"gemm": {"use": "loop"}, "precision": {"use": "bf16"}}


SIZES = st.sampled_from([1, 1, 2, 3, 4])
SHARDS = st.sampled_from([1, 1, 2, 3, "all"])


class TestFolded(LayoutSuite):
    plugin = Folded
    drawn = st.fixed_dictionaries(
        {
            "pp": SIZES,
            "dense": st.fixed_dictionaries({"cp": SIZES, "tp": SIZES}),
            "experts": st.fixed_dictionaries({"ep": SIZES, "etp": SIZES}),
        }
    )
    opened = (
        {"experts": {"ep": 2}},
        {"experts": {"ep": 2, "etp": 2}},
        {"pp": 2, "dense": {"tp": 2}, "experts": {"ep": 2}, "ranks_per_node": 2},
    )


class TestFoldedInAnyOrder(LayoutSuite):
    plugin = Folded
    drawn = st.fixed_dictionaries(
        {
            "pp": st.sampled_from([1, 2]),
            "dense": st.fixed_dictionaries(
                {"cp": SIZES, "tp": SIZES, "order": st.permutations(["dp", "cp", "tp"]), "shard": SHARDS}
            ),
            "experts": st.fixed_dictionaries(
                {
                    "ep": SIZES,
                    "etp": SIZES,
                    "order": st.sampled_from([["edp", "ep", "etp"], ["ep", "edp", "etp"], ["ep", "etp", "edp"]]),
                    "shard": SHARDS,
                }
            ),
        }
    )
    opened = (
        {"dense": {"tp": 2, "order": ["tp", "cp", "dp"], "shard": "all"}},
        {"experts": {"ep": 2, "order": ["ep", "etp", "edp"], "shard": 2}},
    )


class TestCoupled(LayoutSuite):
    plugin = Coupled
    drawn = st.fixed_dictionaries(
        {
            "pp": SIZES,
            "dp": st.sampled_from([None, None, 2, 4]),
            "cp": SIZES,
            "tp": SIZES,
            "ep": SIZES,
            "shard": SHARDS,
            "expert_shard": SHARDS,
        }
    )
    opened = ({"ep": 2, "tp": 2}, {"cp": 2, "ep": 2, "shard": "all", "expert_shard": 2})


class TestFP32(PrecisionSuite):
    plugin = FP32


class TestBF16(PrecisionSuite):
    plugin = BF16


class TestFP8Blockwise(PrecisionSuite):
    plugin = FP8Blockwise
    options = {"backend": "emulate"}
    rtol, block = 0.15, 128


class TestFP8BlockwiseWithExactScales(PrecisionSuite):
    plugin = FP8Blockwise
    options = {"backend": "emulate", "scales": "fp32", "saved_activations": "fp8"}
    rtol, block = 0.15, 128


class TestMXFP8(PrecisionSuite):
    plugin = MXFP8
    options = {"backend": "emulate"}
    rtol, block = 0.15, 64


class TestFP8Tensor(PrecisionSuite):
    plugin = FP8Tensor
    options = {"backend": "emulate"}
    rtol = 0.2


class TestFP8TensorDelayed(PrecisionSuite):
    plugin = FP8Tensor
    options = {"backend": "emulate", "scaling": "delayed", "saved_activations": "fp8"}
    rtol = 0.2


class TestNVFP4(PrecisionSuite):
    plugin = NVFP4
    options = {"backend": "emulate", "keep_bf16": []}
    rtol = 0.4


class TestNVFP4WithoutItsParts(PrecisionSuite):
    plugin = NVFP4
    options = {
        "backend": "emulate",
        "keep_bf16": [],
        "stochastic_rounding": False,
        "hadamard": False,
        "square_weights": False,
    }
    rtol = 0.4
