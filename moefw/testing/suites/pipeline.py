"""The contract of pipeline schedules: ``class TestMine(PipelineSuite): plugin = Mine``."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
from attrs import frozen

from moefw.core.errors import ContractError, Problem
from moefw.core.records import Action, Order, Pair
from moefw.runtime.pipeline.timeline import timeline
from moefw.testing.suites.part import MethodChecks
from moefw.testing.suites.pipeline_case import model_case, order_here, stepped
from moefw.testing.suites.watch import worst_error

RTOL = 2e-5
"""Largest error as a share of a tensor's largest value."""


@frozen
class _Case:
    """Numbers of ranks and micro-batches, and the schedule that is asked."""

    schedule: Any
    ranks: int
    count: int

    def __str__(self) -> str:
        return f"{self.schedule.name} with {self.ranks} ranks and {self.count} micro-batches:"

    @property
    def stages(self) -> range:
        return range(self.schedule.chunks * self.ranks)

    def problems(self) -> list[Problem]:
        return [*self.schedule.check_batches(self.ranks, self.count)]

    def order(self) -> Order:
        order: Order = self.schedule.order(self.ranks, self.count)
        return order

    def passes(self) -> list[list[Action]]:
        """Passes of each rank in order, those of a pair one by one."""
        return [[action for entry in entries for action in entry.passes] for entries in self.order()]

    def rank_of(self, stage: int) -> int:
        return int(self.schedule.rank_of(stage, self.ranks))


class PipelineSuite(MethodChecks):
    """Tests a schedule against its contract: the order of passes as arithmetic, then whole models against one stage."""

    ranks: ClassVar[Sequence[int]] = (1, 2, 3, 4, 8)
    """Numbers of ranks that are tried, each with each number of micro-batches."""
    micro_batches: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 24, 64)
    """Numbers of micro-batches of a step."""

    def test_every_rank_has_as_many_stages(self) -> None:
        """``rank_of`` gives each rank ``chunks`` stages."""
        for case in self._cases():
            num_stages = Counter(map(case.rank_of, case.stages))
            stray = [rank for rank in num_stages if rank not in range(case.ranks)]
            assert not stray, f"{case} rank_of puts a stage on rank {stray[0]}, which does not exist."
            chunks = case.schedule.chunks
            for rank in range(case.ranks):
                says = f"{case} rank_of puts {num_stages[rank]} of {len(case.stages)} stages on rank {rank}"
                assert num_stages[rank] == chunks, f"{says}, where chunks is {chunks}."

    def test_every_pass_runs_once_on_the_rank_of_its_stage(self) -> None:
        """Each stage has one forward and one backward, whole or in parts, of each micro-batch."""
        for case in self._accepted():
            passes_of_ranks = case.passes()
            assert len(passes_of_ranks) == case.ranks, f"{case} order lists the passes of {len(passes_of_ranks)} ranks."
            ran = Counter(_in_words(passes_of_ranks))
            for rank, actions in enumerate(passes_of_ranks):
                for action in actions:
                    says = f"{case} rank {rank} runs {action}"
                    assert action.stage in case.stages, f"{says}, but there are {len(case.stages)} stages."
                    assert action.micro_batch in range(case.count), f"{says}, of a micro-batch that does not exist."
                    right = case.rank_of(action.stage)
                    assert rank == right, f"{says}, but the stage is on rank {right}."
            for word, stage, number in _required_passes(case):
                times = ran[word, stage, number]
                says = f"{case} rank {case.rank_of(stage)} runs the {word} of micro-batch {number} in stage {stage}"
                assert times == 1, f"{says} {times} times, not once."

    def test_a_backward_is_whole_or_in_two_parts(self) -> None:
        """``B``, or ``I`` and later ``W``."""
        for case in self._accepted():
            for rank, actions in enumerate(case.passes()):
                kinds: dict[tuple[int, int], list[str]] = defaultdict(list)
                for action in actions:
                    if action.kind != "F":
                        kinds[action.stage, action.micro_batch].append(action.kind)
                for (stage, number), passes in kinds.items():
                    says = f"{case} rank {rank} runs the backward of micro-batch {number} in stage {stage} as"
                    is_right = passes in (["B"], ["I", "W"])
                    assert is_right, f"{says} {' and '.join(passes)}: it is B, or I and later W."

    def test_pairs_are_listed_where_merges_says_so(self) -> None:
        """A pair is a forward and a backward. ``merges`` is true if an order has one, for any number of micro-batches.

        By ``merges`` a layer gets what pairs need, and what they cannot run is refused.
        """
        merges = self.part.merges
        has_pairs = False
        for case in self._accepted():
            for rank, entries in enumerate(case.order()):
                for pair in entries:
                    if not isinstance(pair, Pair):
                        continue
                    has_pairs = True
                    says = f"{case} rank {rank} runs {pair}"
                    assert merges, f"{says} as a pair, where merges is False."
                    kinds = (pair.forward.kind, pair.backward.kind)
                    assert kinds in (("F", "B"), ("F", "I")), (
                        f"{says}: a pair is a forward and a backward, F and B or I."
                    )
        assert has_pairs or not merges, f"{self.part.name}: merges is True, and no order has a pair."

    def test_the_order_can_be_played_to_its_end(self) -> None:
        """No rank waits for a pass that nobody runs, or that waits for this rank."""
        for case in self._accepted():
            try:
                timeline(case.order(), lambda _: 1)
            except ContractError as error:
                raise AssertionError(f"{case} {error}") from error

    def test_the_order_is_the_same_each_time(self) -> None:
        """Every rank asks for the order of all, and sends what the others expect by it."""
        orders = [(case, case.order()) for case in self._accepted()]
        for (case, order), other in zip(orders, self._accepted(), strict=True):
            for rank, (entries, entries_again) in enumerate(zip(order, other.order(), strict=True)):
                says = f"{case} asked again, rank {rank} runs"
                for entry, entry_again in zip(entries, entries_again, strict=False):
                    assert entry == entry_again, f"{says} {entry_again} in place of {entry}."
                assert len(entries) == len(entries_again), f"{says} {len(entries_again)} passes."

    def test_check_batches_refuses_what_order_cannot_do_and_nothing_that_it_can(self) -> None:
        """A refusal has a reason and a fix. ``order`` cannot do numbers for which it raises or makes other passes."""
        for case in self._cases():
            problems = case.problems()
            fails = _fails(case)
            for problem in problems:
                says = f"{case} check_batches refuses without"
                assert problem.what, f"{says} a reason."
                assert problem.fix, f"{says} a number that can run."
            assert problems or not fails, f"{case} check_batches accepts what order cannot do: {fails}"
            assert fails or not problems, f"{case} check_batches refuses what order can do: {problems[0]}"

    def test_a_model_trains_as_in_one_stage(self) -> None:
        """On real ranks: loss and all gradients. Each rank is told the same order."""
        cases: list[_Case] = []
        may_run_alone = self.part.merges and self.part.chunks == 1
        for world in self.profile.worlds:
            if world > 1 or may_run_alone:
                cases += self._near(max(4, 2 * world), world)
        if not cases:
            pytest.skip(f"{self.plugin.name} runs on none of {self.profile.worlds} ranks")
        for case in cases:
            fails = _fails(case)
            assert not fails, f"{case} it is not run: {fails}"
            model = partial(
                model_case,
                count=case.count,
                layers=max(3, len(case.stages)),
                plugins=(self.plugin,),
            )
            staged = model(case.ranks, parts={**self.parts, self.section: self.chosen})
            orders = self.pool.run(order_here, case.ranks, staged, case.ranks, case.count)
            for rank, order in enumerate(orders):
                assert order == orders[0], f"{case} on rank {rank} of a run, order returns something else."
            (alone,) = self.pool.run(stepped, 1, model(1, parts=self.parts))
            ranks = self.pool.run(stepped, case.ranks, staged)
            for rank, result in enumerate(ranks):
                assert abs(result.loss / alone.loss - 1) <= RTOL, f"{case} the loss is {result.loss}, not {alone.loss}."
                for name, grad in result.grads.items():
                    error = worst_error(grad, alone.grads[name], floor=1e-30)
                    says = f"{case} the gradient of {name} on rank {rank} is off by"
                    assert error <= RTOL, f"{says} {error:.1e} of its largest value."
            assert orders[0] == case.order(), f"{case} in a run, order returns something else."
            missing = sorted(alone.grads.keys() - {name for result in ranks for name in result.grads})
            assert not missing, f"{case} no rank has {missing[0]}."

    def _near(self, count: int, world: int) -> list[_Case]:
        """Case of so many ranks whose number of micro-batches is nearest, if there is one."""
        accepted = [case for case in self._cases((world,)) if not case.problems()]
        return sorted(accepted, key=lambda case: abs(case.count - count))[:1]

    def _cases(self, ranks: Sequence[int] = ()) -> list[_Case]:
        """Numbers to try, with a declaration whose options are read as from a spec."""
        schedule = self.part
        return [_Case(schedule, each, count) for each in ranks or self.ranks for count in self.micro_batches]

    def _accepted(self) -> list[_Case]:
        """Cases that ``check_batches`` accepts, of which there must be one."""
        accepted = [case for case in self._cases() if not case.problems()]
        numbers = f"{tuple(self.micro_batches)} micro-batches on {tuple(self.ranks)} ranks"
        assert accepted, f"{self.plugin.name}: check_batches refuses all of {numbers}."
        return accepted


def _required_passes(case: _Case) -> Iterator[tuple[str, int, int]]:
    """Yield what is to run: forward or backward, stage, micro-batch."""
    for word in ("forward", "backward"):
        for stage in case.stages:
            for number in range(case.count):
                yield word, stage, number


def _in_words(passes_of_ranks: Sequence[Sequence[Action]]) -> list[tuple[str, int, int]]:
    """Passes of all ranks: forward or backward, stage, micro-batch. ``W`` is part of a backward."""
    words = {"F": "forward", "B": "backward", "I": "backward"}
    return [
        (words[action.kind], action.stage, action.micro_batch)
        for action in itertools.chain.from_iterable(passes_of_ranks)
        if action.kind in words
    ]


def _fails(case: _Case) -> str:
    """Why an order fails, in a sentence; empty if all passes run."""
    try:
        passes_of_ranks = case.passes()
        timeline(case.order(), lambda _: 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    required = {*_required_passes(case)}
    passes = {*_in_words(passes_of_ranks)}
    if required - passes:
        return f"it leaves out {len(required - passes)} passes."
    if passes - required:
        return f"it runs {len(passes - required)} passes of what does not exist."
    return ""
