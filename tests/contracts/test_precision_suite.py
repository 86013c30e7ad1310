"""The suite of precisions: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_precisions as recipes
from moefw.plugins.precision.native import BF16, FP32
from moefw.plugins.precision.quantized import MXFP8, NVFP4, FP8Blockwise, FP8Tensor
from moefw.testing.suites.precision import PrecisionSuite

BROKEN: list[tuple[Any, str, str]] = [
    (recipes.Rounds, "operands_are_close", "off by"),
    (recipes.Rounds, "a_layer_stays_close", "of a layer of 13 tokens is off by"),
    (recipes.LosesColumns, "no_value_of_a_large", "(7, 320) (role input during fprop) becomes an operand that is off"),
    (recipes.LosesRowsOfTheWeightGradient, "no_term_of_a_large", "operands of wgrad over ten blocks is off by"),
    (recipes.OffersAnother, "operands_have_the_shape", "torch.float32 is what the recipe offers"),
    (recipes.OffersWhatNobodyTakes, "a_gemm_takes", "offers operands that no GEMM takes"),
    (recipes.Detaches, "gradients_flow", "no gradient flows through an operand (role weight"),
    (recipes.ScalesTheGradient, "gradients_flow", "not that of the identity"),
    (recipes.Flattens, "operands_have_the_shape", "the shape must stay"),
    (recipes.NeedsRows, "operands_have_the_shape", "fails on (0,"),
    (recipes.RoundsByChance, "the_same_tensor", "has other bits the second time"),
    (recipes.RemembersTheLargest, "quantize_writes_nothing", "in quantize. A recipe keeps nothing"),
    (recipes.WritesIntoTheTensor, "quantize_writes_nothing", "writes into the tensor"),
    (
        recipes.KeepsAnother,
        "what_is_kept",
        "makes an operand off by",
    ),
    (recipes.TurnsOneOfTwo, "operands_of_the_weight_gradient", "the product of its operands, is off"),
    (recipes.KeepsLess, "what_is_kept", "the shape must stay"),
    (recipes.ScalesColumns, "an_outlier_costs", "beside an outlier row, an operand (role input during fprop) is off"),
    (
        recipes.ScalesRowsInDgrad,
        "an_outlier_costs",
        "beside an outlier column, an operand (role weight during dgrad) is off",
    ),
    (
        recipes.ScalesRowsInWgrad,
        "an_outlier_costs",
        "beside an outlier column of role grad, the weight gradient is off",
    ),
    (
        recipes.SumsAlongRowsInBothPasses,
        "operands_made_in_one_read",
        "during wgrad) that is made in one read has other bits than",
    ),
    (recipes.SharesTheWeightOfForward, "operands_of_a_step", "during dgrad) has other bits than that of quantize"),
    (recipes.LosesInfinities, "values_that_are_not_finite", "inf (role grad during fprop) becomes 0, and everything"),
    (recipes.LosesWhatIsNotANumber, "values_that_are_not_finite", "nan (role input during wgrad) is kept for backward"),
    (recipes.ScalesTheLastBlockByTheOneBefore, "a_block_that_is_not_full", "larger, the weight gradient is off by"),
    (recipes.DrawsTooLittle, "random_rounding_has_no_bias", "standard errors off; 4 are allowed"),
    (recipes.DrawsByPlace, "random_rounding_follows", "draws by the place of a row"),
    (recipes.DrawsOncePerRow, "random_rounding_draws", "draws once for all columns of a row"),
    (recipes.KnowsNoRows, "its_methods_take", "during=..., rows=...): got an unexpected keyword argument 'rows'"),
    (recipes.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'allone'. Did you mean 'alone'?"),
    (recipes.RemembersInItsModule, "the_modules_of_its_package", "writes broken_precisions.LARGEST.value as it runs"),
    (recipes.FlowsInWholeNumbers, "the_residual_dtype", "residual_dtype is torch.int8"),
]


@pytest.mark.parametrize(("plugin", "check", "says"), BROKEN, ids=[f"{case[0].name}: {case[1]}" for case in BROKEN])
def test_what_is_broken_is_caught_and_named(
    must_catch: Callable[..., None], plugin: Any, check: str, says: str
) -> None:
    must_catch(PrecisionSuite, plugin, check, says)


class TestFP32(PrecisionSuite):
    plugin = FP32


class TestBF16(PrecisionSuite):
    plugin = BF16


class TestInt8WithAScaleForEachRow(PrecisionSuite):
    plugin = recipes.Int8


class TestInt8WithScalesAlongEachSum(PrecisionSuite):
    plugin = recipes.Int8ByPass


class TestInt8RoundedAtRandom(PrecisionSuite):
    plugin = recipes.Int8Drawn


class TestFP8Blockwise(PrecisionSuite):
    plugin = FP8Blockwise
    options = {"backend": "emulate"}
    block = 128


class TestFP8BlockwiseWithExactScales(PrecisionSuite):
    plugin = FP8Blockwise
    options = {"backend": "emulate", "scales": "fp32", "saved_activations": "fp8"}
    block = 128


class TestMXFP8(PrecisionSuite):
    plugin = MXFP8
    options = {"backend": "emulate"}
    block = 64


class TestFP8Tensor(PrecisionSuite):
    plugin = FP8Tensor
    options = {"backend": "emulate"}


class TestFP8TensorDelayed(PrecisionSuite):
    plugin = FP8Tensor
    options = {"backend": "emulate", "scaling": "delayed", "saved_activations": "fp8"}


class TestNVFP4(PrecisionSuite):
    plugin = NVFP4
    options = {"backend": "emulate", "keep_bf16": []}


class TestNVFP4WithoutItsParts(PrecisionSuite):
    plugin = NVFP4
    options = {
        "backend": "emulate",
        "keep_bf16": [],
        "stochastic_rounding": False,
        "hadamard": False,
        "square_weights": False,
    }
