"""The suite of learning-rate schedules: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_schedules as broken
from moefw.plugins.schedules.warmed_up import WSD, Cosine
from moefw.testing.suites.schedule import ScheduleSuite

BROKEN: list[tuple[Any, str, str]] = [
    (broken.KnowsNoEnd, "its_methods_take", "is called as factor(step, steps): too many positional arguments"),
    (broken.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'raged'"),
    (broken.EndsBelowZero, "a_factor_is", "the factor of step 2 of 3 is"),
    (broken.DividesByZero, "a_factor_is", "step 0 of 1 raises ZeroDivisionError"),
    (broken.IsNoNumber, "a_factor_is", "the factor of step 2 of 3 is nan, which is no finite number from 0 on."),
    (broken.SaysYes, "a_factor_is", "the factor of step 0 of 1 is True, which is no finite number"),
    (broken.BeginsAgainAtItsEnd, "its_last_step", "the factor goes from 0.002 to 1 in the last step of 1000"),
    (broken.NeverLearns, "a_run_learns", "the factor is 0 in each of 1000 steps."),
    (broken.CountsCalls, "a_factor_depends", "the factor of step 1 of 2 is 0.5, and 1.0 if the later steps"),
]


@pytest.mark.parametrize(("plugin", "check", "says"), BROKEN, ids=[f"{each[0].name}-{each[1]}" for each in BROKEN])
def test_what_is_broken_is_caught_and_named(
    must_catch: Callable[..., None], plugin: Any, check: str, says: str
) -> None:
    must_catch(ScheduleSuite, plugin, check, says)


class TestSound(ScheduleSuite):
    plugin = broken.Sound


class TestCosine(ScheduleSuite):
    plugin = Cosine


class TestWSD(ScheduleSuite):
    plugin = WSD


class TestWSDWithoutWarmUp(ScheduleSuite):
    plugin = WSD
    options = {"warmup_steps": 0, "decay_share": 1.0}
