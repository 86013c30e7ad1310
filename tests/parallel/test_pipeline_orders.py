"""The orders of pipeline schedules: those of the papers, complete, playable, with the published idle time and memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import pytest

import moefw
from moefw.core.plugin import PipelinePlugin
from moefw.plugins.pipelines.interleaved import Interleaved
from moefw.plugins.pipelines.one_stage import GPipe, OneForwardOneBackward, ZeroBubble
from moefw.plugins.pipelines.torch_orders import order_of
from moefw.plugins.pipelines.v_shaped import ZBV, DualPipeV
from moefw.runtime.pipeline.timeline import idle_share, most_in_flight, timeline

GPIPE = """
F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
"""
"""4 stages, 8 micro-batches."""
ALTERNATING = """
F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""
"""arXiv 2104.04473, figure 4, above: 4 stages, 8 micro-batches."""
INTERLEAVED = """
F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 b0 F7 b1 f4 b2 f5 b3 f6 B0 f7 B1 B2 B3 b4 b5 b6 b7 B4 B5 B6 B7
F0 F1 F2 F3 f0 f1 f2 f3 F4 b0 F5 b1 F6 b2 F7 b3 f4 B0 f5 B1 f6 B2 f7 B3 b4 b5 b6 b7 B4 B5 B6 B7
F0 F1 F2 F3 f0 f1 f2 b0 f3 b1 F4 b2 F5 b3 F6 B0 F7 B1 f4 B2 f5 B3 f6 b4 f7 b5 b6 b7 B4 B5 B6 B7
F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 F4 B0 F5 B1 F6 B2 F7 B3 f4 b4 f5 b5 f6 b6 f7 b7 B4 B5 B6 B7
"""
"""The same figure, below: 4 ranks with 2 stages each. Small letters are the second one."""
TABLES = {GPipe: GPIPE, OneForwardOneBackward: ALTERNATING, Interleaved: INTERLEAVED}
IDLE = {
    GPipe: Fraction(3, 11),
    OneForwardOneBackward: Fraction(3, 11),
    Interleaved: Fraction(3, 19),
    ZeroBubble: Fraction(3, 27),
    ZBV: Fraction(3, 51),
    DualPipeV: Fraction(3, 51),
}
"""For p = 4 ranks, M = 8 micro-batches and v stages a rank: (p - 1) / (vM + p - 1), and with weight gradients in the
idle time (p - 1) / (3vM + p - 1)."""
SCHEDULES = (GPipe(), OneForwardOneBackward(), Interleaved(), Interleaved(chunks=3), ZeroBubble(), ZBV(), DualPipeV())
IN_PARTS = ("zero-bubble", "zbv", "dualpipe-v")
"""Schedules with weight gradients of their own."""
ALL = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: f"{one.name}-{one.chunks}")


def cases(schedule: PipelinePlugin) -> list[tuple[int, int]]:
    """Return numbers of ranks and micro-batches that a schedule accepts: fewer micro-batches than ranks, and more."""
    every = [(ranks, count) for ranks in range(1, 9) for count in (*range(1, 18), 24, 40)]
    return [(ranks, count) for ranks, count in every if not [*schedule.check_batches(ranks, count)]]


@pytest.mark.parametrize("made", TABLES, ids=lambda made: made.name)
def test_an_order_is_that_of_the_paper(made: type[PipelinePlugin]) -> None:
    schedule = made()
    for rank, (actions, row) in enumerate(zip(schedule.order(4, 8), TABLES[made].split("\n")[1:-1], strict=True)):
        written = [f"{one.kind.lower() if one.stage >= 4 else one.kind}{one.micro_batch}" for one in actions]
        assert written == row.split()
        assert all(schedule.rank_of(one.stage, 4) == rank for one in actions)


@ALL
def test_a_stage_runs_forward_and_backward_once_for_each_micro_batch_on_its_rank(schedule: PipelinePlugin) -> None:
    for ranks, count in cases(schedule):
        passes = Counter((rank, one) for rank, actions in enumerate(schedule.order(ranks, count)) for one in actions)
        stages = range(ranks * schedule.chunks)
        for stage, number in itertools.product(stages, range(count)):
            ran = [
                kind
                for kind in "FIWB"
                if passes.pop((schedule.rank_of(stage, ranks), moefw.Action(kind, stage, number)), 0) == 1
            ]
            assert ran in ([*"FB"], [*"FIW"] if schedule.name in IN_PARTS else None), (ranks, count)
        assert not passes


@ALL
def test_an_order_can_be_played(schedule: PipelinePlugin) -> None:
    for ranks, count in cases(schedule):
        order = schedule.order(ranks, count)
        played = timeline(order, lambda _: 1)
        ended = {str(one).replace("I", "B"): end for actions in played for _, end, one in actions}
        for start, _, one in (each for actions in played for each in actions):
            stage, last = one.stage, ranks * schedule.chunks - 1
            if one.kind == "F":
                assert stage == 0 or start >= ended[f"{stage - 1}F{one.micro_batch}"]
            elif one.kind == "W":
                assert start >= ended[f"{stage}B{one.micro_batch}"]
            else:
                assert start >= ended[f"{stage}F{one.micro_batch}"]
                assert stage == last or start >= ended[f"{stage + 1}B{one.micro_batch}"]
        assert [[one for _, _, one in actions] for actions in played] == [list(actions) for actions in order]


def test_a_rank_that_waits_for_ever_is_named() -> None:
    first, second = OneForwardOneBackward().order(2, 2)
    with pytest.raises(moefw.ContractError) as caught:
        timeline([first, second[1:]], lambda _: 1)
    assert str(caught.value) == (
        "rank 0 waits at 0B0 for the backward of micro-batch 0 in stage 1.\n"
        "rank 1 waits at 1B0 for the forward of micro-batch 0 in stage 1."
    )


@pytest.mark.parametrize("made", IDLE, ids=lambda made: made.name)
def test_ranks_idle_as_published(made: type[PipelinePlugin]) -> None:
    """A whole backward takes twice as long as a forward or a part, and a stage its share of a rank's layers."""
    schedule = made()
    played = timeline(schedule.order(4, 8), lambda one: Fraction(2 if one.kind == "B" else 1, schedule.chunks))
    assert idle_share(played) == [IDLE[made]] * 4


def test_no_rank_idles_between_its_first_and_its_last_pass_under_zbv() -> None:
    for passes in timeline(ZBV().order(4, 8), lambda _: 1):
        assert all(start == end for (_, end, _), (start, _, _) in itertools.pairwise(passes))


@ALL
def test_micro_batches_are_held_as_published(schedule: PipelinePlugin) -> None:
    chunks = schedule.chunks
    full = {"interleaved": lambda ranks, count: count % ranks == 0, "zbv": lambda ranks, count: count >= 2 * ranks - 1}
    is_full = full.get(schedule.name, lambda ranks, count: True)
    for ranks, count in (numbers for numbers in cases(schedule) if is_full(*numbers)):
        for rank, actions in enumerate(schedule.order(ranks, count)):
            held = {
                "gpipe": count,
                "1f1b": min(ranks - rank, count),
                "interleaved": min((ranks - rank - 1) * 2 + (chunks - 1) * ranks + 1, chunks * count),
                "zero-bubble": min(ranks, count),
                "zbv": 2 * ranks,
                "dualpipe-v": 2 * ranks + 1,
            }
            assert most_in_flight(actions) == held[schedule.name], (ranks, count, rank)


def test_zero_bubble_is_that_of_torch_where_torch_has_one() -> None:
    for ranks, count in ((1, 1), (2, 2), (2, 6), (4, 8), (4, 10), (8, 24)):
        assert ZeroBubble().order(ranks, count) == [
            [*actions] for actions in order_of("ScheduleInterleavedZeroBubble", 1, ranks, count)
        ]


def test_interleaved_is_that_of_torch() -> None:
    for chunks, ranks, count in itertools.product((2, 3), (1, 2, 4, 8), (1, 2, 6, 8, 24)):
        if [*Interleaved(chunks=chunks).check_batches(ranks, count)]:
            continue
        assert Interleaved(chunks=chunks).order(ranks, count) == [
            [*actions] for actions in order_of("ScheduleInterleaved1F1B", chunks, ranks, count)
        ]


def test_dualpipe_v_refuses_what_it_cannot_do_and_suggests_the_nearest_that_it_can() -> None:
    schedule = DualPipeV()
    for ranks in range(1, 9):
        for count in range(1, 2 * ranks):
            with pytest.raises(ValueError, match="at least"):
                schedule.order(ranks, count)
            (problem,) = schedule.check_batches(ranks, count)
            assert problem.fix.startswith(f"Use {2 * ranks} ")
        assert not [*schedule.check_batches(ranks, 2 * ranks)]


def test_interleaved_refuses_what_it_cannot_do_and_suggests_the_nearest_that_it_can() -> None:
    schedule = Interleaved()

    def runs(ranks: int, count: int) -> bool:
        try:
            return bool(schedule.order(ranks, count))
        except ValueError:
            return False

    for ranks in range(1, 9):
        able = [count for count in range(1, 49) if runs(ranks, count)]
        assert [count for count in range(1, 49) if not [*schedule.check_batches(ranks, count)]] == able
        for count in range(1, 41):
            for problem in schedule.check_batches(ranks, count):
                suggested = int(problem.fix.split()[1])
                assert suggested in able
                assert abs(suggested - count) == min(abs(other - count) for other in able)


def test_schedules_whose_orders_are_not_from_torch_need_no_torch() -> None:
    code = "from moefw.plugins.pipelines.one_stage import *; GPipe().order(4, 8); OneForwardOneBackward().order(4, 8)"
    code += "; from moefw.plugins.pipelines.interleaved import Interleaved; Interleaved().order(4, 8)"
    code += "; import moefw.runtime.pipeline.timeline, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
