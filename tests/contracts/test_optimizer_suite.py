"""The suite of optimizers: the built-in one passes it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

import broken_matrix_rules as rules
import broken_optimizers as broken
from moefw.plugins.optimizers.adamw import AdamW
from moefw.plugins.optimizers.muon import Muon
from moefw.testing.suites.optimizer import OptimizerSuite
from moefw.testing.suites.optimizer_rule import SCALES

AS_THEY_ARE, _, ZERO = SCALES
BROKEN: list[tuple[Any, str, str, tuple[str, ...]]] = [
    (broken.NeedsAClosure, "its_methods_take", "is called as step(): missing a required argument: 'closure'", ()),
    (broken.BuildsNoOptimizer, "its_methods_take", "it returns None, and not a torch.optim.Optimizer", ()),
    (rules.KnowsNoShape, "its_methods_take", "got an unexpected keyword argument 'shape'", ()),
    (broken.MisspellsItsOffer, "its_offers_are_values", "for 'ofload'. Did you mean 'offload'?", ()),
    (broken.SaysNothing, "it_says", 'offers() does not say update=("elementwise",), so every spec with it is', ()),
    (broken.LeavesOutNorms, "it_updates", "layers.0.attention_norm.weight is in 0 groups of parameters.", ()),
    (broken.GoesUp, "it_goes_down", "a sum of squares goes from ", ()),
    (broken.KeepsItsRate, "the_learning_rate", "changes at a learning rate of 0, written into its group.", ()),
    (broken.DecaysTwice, "weight_decay", "takes 0.00199897 off embed.weight; lr x weight_decay is 0.001.", ()),
    (broken.NeedsEveryGradient, "a_parameter_without", "a parameter without a gradient raises TypeError", ()),
    (broken.DrawsNoise, "the_same_steps", "when the steps run again, embed.weight has other bits.", ()),
    (broken.ReadsNames, "names_decide", "under another name, layers.0.attention_norm.weight has other bits.", ()),
    (broken.ClipsAllTogether, "no_parameter", "updated without the others, embed.weight has other bits.", ()),
    (broken.NormalisesColumns, "parts_that", "cut along rows, embed.weight has other bits.", ("rows",)),
    (broken.NormalisesRows, "parts_that", "cut along columns, embed.weight has other bits.", ("columns",)),
    (broken.TakesPartsForWhole, "parts_that", "cut along rows, embed.weight has other bits.", ("rows",)),
    (broken.TakesGateAndUpTogether, "parts_that", "cut along rows, layers.0.moe.experts.gate_up has", ("rows",)),
    (broken.MixesExperts, "parts_that", "the first dimension, layers.0.moe.experts.gate_up", ("the first dimension",)),
    (broken.DrawsFromASeed, "parts_that", "cut along columns, embed.weight has other bits.", ("columns",)),
    (
        broken.DecaysPlainMatricesAlone,
        "a_stack_is",
        "in a stack, layers.0.moe.experts.0.gate_proj.weight has other bits.",
        (),
    ),
    (broken.ScalesByTheNorm, "layouts", "under tp 2, etp 2, embed.weight has other bits.", ("tp 2, etp 2",)),
    (broken.MixesExperts, "layouts", "under all sharded, ep 2, layers.1.moe.experts.0.gate", ("all sharded, ep 2",)),
    (broken.NamesAnotherState, "states_are", "states() names velocity, and embed.weight has ['momentum'].", ()),
    (
        broken.SaysNothingIsBelowZero,
        "states_are",
        "nonnegative_states() names momentum, and in that of embed.weight is -",
        (),
    ),
    (broken.KeepsBF16, "states_are", "of embed.weight is torch.bfloat16 (8, 128), not torch.float32 (8, 128).", ()),
    (broken.CountsForItself, "with_states", "after a checkpoint, embed.weight has other bits.", ()),
    (broken.ScalesByTheNorm, "rows_that", "updated in two halves, embed.weight has other bits.", ()),
    (broken.BeginsAtTheGradient, "rows_that", "updated in two halves, embed.weight has other bits.", ()),
    (
        rules.TakesBiases,
        "its_rule_takes_matrices",
        "takes a parameter of 1 tensors of one dimension, of role bias.",
        (),
    ),
    (rules.TakesByName, "names_do_not", "whether the rule takes a matrix depends on its name, layers.0.norm", ()),
    (rules.TransposesTallMatrices, "its_rule_returns", "(128, 8) is torch.float32 (3, 8, 128), not", (AS_THEY_ARE,)),
    (rules.ReturnsBF16, "its_rule_returns", "is torch.bfloat16 (3, 8, 128), not torch.float32 (3, 8,", (AS_THEY_ARE,)),
    (rules.DividesByZero, "its_rule_returns", "is not finite where they are zero", (ZERO,)),
    (rules.RemembersMatrices, "its_rule_keeps", "of the same matrices has other bits after one of others.", ()),
    (rules.CountsSteps, "its_rule_keeps", "steps change count of the rule.", ()),
    (rules.NormalisesTheBatch, "a_matrix_does", "a matrix (8, 128) depends on those beside it.", ()),
    (
        rules.CountsPlaces,
        "a_matrix_alone",
        "in another order, the update of a matrix (8, 128) is 2 off; 0.05 is right.",
        (),
    ),
    (rules.NormalisesItsPart, "parts_get", "cut along rows, the direction has other bits than in the whole.", ()),
    (rules.ChangesGradients, "parts_get", "direction() changes the gradient.", ()),
    (rules.DrawsDirections, "a_direction", "the same gradients again give another direction.", ()),
    (rules.KeepsMoreStates, "a_direction", "direction() keeps last, which states() does not name.", ()),
    (rules.MeasuresItsPart, "parts_are", "cut along columns, apply() leaves other bits than in the whole.", ()),
    (rules.MeasuresItsPart, "layouts", "under tp 2, etp 2, layers.0.mlp.gate_proj.weight is", ("tp 2, etp 2",)),
    (rules.HasARateOfItsOwn, "its_rule_changes", "apply() changes a matrix at a learning rate of 0.", ()),
    (rules.DecaysMatricesTwice, "its_rule_takes_weight", "off a matrix; lr x weight_decay is 0.001.", ()),
    (rules.ClimbsUp, "its_rule_goes", "by the rule, a sum of squares goes from", ()),
]


@pytest.mark.parametrize(
    ("plugin", "check", "says", "arguments"), BROKEN, ids=[f"{each[0].name}-{each[1]}" for each in BROKEN]
)
def test_what_is_broken_is_caught_and_named(
    must_catch: Callable[..., None], plugin: Any, check: str, says: str, arguments: tuple[str, ...]
) -> None:
    must_catch(OptimizerSuite, plugin, check, says, *arguments)


class TestSound(OptimizerSuite):
    plugin = broken.Sound


class TestStranger(OptimizerSuite):
    plugin = rules.Polar


class TestAdamW(OptimizerSuite):
    plugin = AdamW


class TestMuon(OptimizerSuite):
    plugin = Muon


class TestMuonFP32(OptimizerSuite):
    plugin = Muon
    options: ClassVar[Mapping[str, Any]] = {"newton_schulz": "fp32", "router": "muon"}
    rtol = 1e-3
