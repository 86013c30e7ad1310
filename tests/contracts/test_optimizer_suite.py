"""The suite of optimizers: the built-in one passes it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_optimizers as broken
from moefw.plugins.optimizers.adamw import AdamW
from moefw.testing.suites.optimizer import OptimizerSuite

BROKEN: list[tuple[Any, str, str]] = [
    (broken.LeavesOutNorms, "it_updates", "layers.0.attention_norm.weight is in 0 groups of parameters."),
    (broken.GoesUp, "it_goes_down", "a sum of squares goes from "),
    (broken.KeepsItsRate, "the_learning_rate", "changes at a learning rate of 0, written into its group."),
    (broken.NeedsEveryGradient, "a_parameter_without", "a parameter without a gradient raises TypeError"),
    (broken.DrawsNoise, "the_same_steps", "when the steps run again, embed.weight has other bits."),
    (broken.NamesAnotherState, "states_are", "states() names velocity, and embed.weight has ['momentum']."),
    (
        broken.SaysNothingIsBelowZero,
        "states_are",
        "nonnegative_states() names momentum, and in that of embed.weight is -",
    ),
    (broken.KeepsBF16, "states_are", "momentum of embed.weight is torch.bfloat16 (8, 64), not torch.float32 (8, 64)."),
    (broken.CountsForItself, "with_states", "after a checkpoint, embed.weight has other bits."),
    (broken.ScalesByTheNorm, "rows_that", "updated in two halves, embed.weight has other bits."),
    (broken.BeginsAtTheGradient, "rows_that", "updated in two halves, embed.weight has other bits."),
]


@pytest.mark.parametrize(("plugin", "check", "says"), BROKEN, ids=[f"{each[0].name}-{each[1]}" for each in BROKEN])
def test_what_is_broken_is_caught_and_named(
    must_catch: Callable[..., None], plugin: Any, check: str, says: str
) -> None:
    must_catch(OptimizerSuite, plugin, check, says)


class TestSound(OptimizerSuite):
    plugin = broken.Sound


class TestAdamW(OptimizerSuite):
    plugin = AdamW
