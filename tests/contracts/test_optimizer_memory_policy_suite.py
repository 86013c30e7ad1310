"""The suite of memory policies of the optimizer names what is broken. The built-in ones pass it in tests/memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_optimizer_memory_policies as policies
from moefw.testing.suites.optimizer_memory_policy import OptimizerMemoryPolicySuite

BROKEN: list[tuple[Any, str, str]] = [
    (policies.TreatsActivations, "its_methods_take", "returns a _OfActivations, and not a moefw.OptimizerPolicy"),
    (policies.KnowsNoBoxes, "its_methods_take", "is called as problems(boxes): too many positional arguments"),
    (policies.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'allways'"),
    (policies.WrapsFunctions, "it_wraps_no", "wraps a function"),
    (policies.GoesFurther, "an_update_is", " off; "),
    (policies.CountsBesideTheStates, "a_run_that_resumes", "after a checkpoint, parameters has other bits"),
    (policies.Jitters, "the_same_steps", "when the run is repeated, parameters has other bits"),
    (policies.KnowsTheWorld, "no_layout", "with ep 2, parameters has other bits"),
    (policies.AsksForNothing, "an_optimizer_that", "accepts an optimizer that does not offer its states"),
]


@pytest.mark.parametrize(("made", "check", "says"), BROKEN, ids=[f"{case[0].__name__}: {case[1]}" for case in BROKEN])
def test_what_is_broken_is_caught_and_named(must_catch: Callable[..., None], made: Any, check: str, says: str) -> None:
    given = ("ep 2",) if check == "no_layout" else ()
    must_catch(OptimizerMemoryPolicySuite, policies.PLUGINS[made], check, says, *given)


class TestPlain(OptimizerMemoryPolicySuite):
    plugin = policies.PLUGINS[policies.PlainStates]
    rtol = None
