"""The suite of pipeline schedules: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import broken_pipelines as broken
from moefw.plugins.pipelines.interleaved import Interleaved
from moefw.plugins.pipelines.merged import Merged
from moefw.plugins.pipelines.one_stage import GPipe, OneForwardOneBackward, ZeroBubble
from moefw.plugins.pipelines.v_shaped import ZBV, DualPipeV
from moefw.testing.suites.pipeline import PipelineSuite

BROKEN: list[tuple[Any, str, str]] = [
    (broken.CountsItsRanksItself, "its_methods_take", "is called as order(ranks, micro_batches): too many positional"),
    (broken.CallsForItsChunks, "its_methods_take", "is a method, and chunks is read, not called. Make it a property."),
    (broken.MisspellsItsOffer, "its_offers_are_values", "of which no part knows 'raged'"),
    (broken.HasTooFewLists, "every_pass", "with 2 ranks and 1 micro-batches: order lists the passes of 1 ranks."),
    (broken.RunsTwice, "every_pass", "rank 0 runs the forward of micro-batch 0 in stage 0 2 times, not once."),
    (
        broken.MixesUpRanks,
        "every_pass",
        "with 2 ranks and 1 micro-batches: rank 0 runs 1F0, but the stage is on rank 1.",
    ),
    (broken.LosesCountOfMany, "every_pass", "64 micro-batches: rank 0 runs the forward of micro-batch 0 in stage 0 0"),
    (broken.RunsAMicroBatchTooMany, "every_pass", "rank 0 runs 0F1, of a micro-batch that does not exist."),
    (
        broken.RunsAStageTooMany,
        "every_pass",
        "with 1 ranks and 1 micro-batches: rank 0 runs 1F0, but there are 1 stages.",
    ),
    (broken.PutsStagesOnOneRank, "every_rank", "rank_of puts 2 of 2 stages on rank 0, where chunks is 1."),
    (broken.CountsRanksFromOne, "every_rank", "rank_of puts a stage on rank 1, which does not exist."),
    (broken.ForgetsWeights, "a_backward", "rank 0 runs the backward of micro-batch 0 in stage 0 as I: it is B, or"),
    (broken.HidesItsPairs, "pairs_are", "rank 0 runs 0F1+0B0 as a pair, where merges is False."),
    (broken.HasNoPairs, "pairs_are", "merges is True, and no order has a pair."),
    (broken.PairsTwoPartsOfABackward, "pairs_are", "rank 0 runs 0I0+0W0: a pair is a forward and a backward, F and B"),
    (broken.PairsWhatNeedsEachOther, "the_order_can", "rank 0 runs 0F0 and 0B0 as a pair, and one needs the other"),
    (broken.BackwardFirst, "the_order_can", "rank 0 waits at 0I0 for the forward of micro-batch 0 in stage 0."),
    (broken.Moody, "the_order_is", "asked again, rank 0 runs"),
    (
        broken.RefusesOddNumbers,
        "check_batches",
        "with 1 ranks and 1 micro-batches: check_batches refuses what order can do: 1",
    ),
    (broken.RefusesAll, "every_pass", "check_batches refuses all of (1, 2, 3"),
    (broken.AcceptsWhatItRaisesFor, "check_batches", "check_batches accepts what order cannot do: ValueError: too few"),
    (
        broken.AcceptsWhatItLeavesOut,
        "check_batches",
        "2 ranks and 3 micro-batches: check_batches accepts what order cannot do: it leaves out 4 passes.",
    ),
    (broken.RunsAMicroBatchTooMany, "check_batches", "order cannot do: it runs 2 passes of what does not exist."),
    (broken.AsksItsRank, "a_model", "on rank 1 of a run, order returns something else."),
    (broken.SkipsWeights, "a_model", "on rank 0 is off by"),
    (broken.SkipsAMicroBatch, "a_model", "the loss is "),
    (
        broken.RefusesWithoutAFix,
        "check_batches",
        "with 2 ranks and 1 micro-batches: check_batches refuses without a number that",
    ),
]


@pytest.mark.parametrize(("plugin", "check", "says"), BROKEN, ids=[f"{case[0].name}: {case[1]}" for case in BROKEN])
def test_what_is_broken_is_caught_and_named(
    must_catch: Callable[..., None], plugin: Any, check: str, says: str
) -> None:
    must_catch(PipelineSuite, plugin, check, says)


class TestSound(PipelineSuite):
    plugin = broken.Sound


class TestSoundPairs(PipelineSuite):
    plugin = broken.SoundPairs


class TestGPipe(PipelineSuite):
    plugin = GPipe


class TestOneForwardOneBackward(PipelineSuite):
    plugin = OneForwardOneBackward


class TestInterleaved(PipelineSuite):
    plugin = Interleaved


class TestMerged(PipelineSuite):
    plugin = Merged


class TestMergedInterleaved(PipelineSuite):
    plugin = Interleaved
    options = {"merged": True}


class TestMergedDualPipeV(PipelineSuite):
    plugin = DualPipeV
    options = {"merged": True}


class TestThreeStagesARank(PipelineSuite):
    plugin = Interleaved
    options = {"chunks": 3}


class TestZeroBubble(PipelineSuite):
    plugin = ZeroBubble


class TestZBV(PipelineSuite):
    plugin = ZBV


class TestDualPipeV(PipelineSuite):
    plugin = DualPipeV
