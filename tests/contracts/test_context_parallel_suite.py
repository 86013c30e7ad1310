"""The suite of context parallelism: the built-in algorithms pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_context_parallels as broken
from moefw.plugins.context_parallel.allgather_kv import AllGatherKV
from moefw.plugins.context_parallel.ring_attention import Ring
from moefw.plugins.context_parallel.ulysses import Ulysses
from moefw.testing.suites.context_parallel import ContextParallelSuite

BROKEN: list[tuple[Any, str, str]] = [
    (broken.KnowsNoSinks, "its_methods_take", "got an unexpected keyword argument 'sinks_H'"),
    (broken.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'allways'"),
    (broken.SeesItsOwnKeysAlone, "equals_attention", "the output is off"),
    (broken.LosesGradientsOfOthers, "equals_attention", "the gradient of the keys is off"),
    (broken.SeesTwoSequencesInAPack, "equals_attention", "lengths=(4, 40, 4)"),
    (broken.CutsPacksAsOneSequence, "equals_attention", "lengths=(44, 4)"),
    (broken.Remembers, "keeps_nothing", "with two calls with unlike masks in flight, the gradient of"),
    (broken.RemembersTheMask, "keeps_nothing", "unlike masks in flight, the gradient of the queries changes"),
    (broken.CutsAmongEvenNumbersAlone, "equals_attention", "on 3 ranks"),
    (broken.SavesAllKeys, "saves_its_own", "bytes; "),
]


@pytest.mark.parametrize(("made", "check", "says"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_what_is_broken_is_caught_and_named(must_catch: Callable[..., None], made: Any, check: str, says: str) -> None:
    must_catch(ContextParallelSuite, broken.PLUGINS[made], check, says)


class TestAllGatherKV(ContextParallelSuite):
    plugin = AllGatherKV


class TestRing(ContextParallelSuite):
    plugin = Ring


class TestUlysses(ContextParallelSuite):
    plugin = Ulysses
