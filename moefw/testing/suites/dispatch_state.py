"""Checks for hidden state: nothing is kept between calls, handles stay valid, inputs stay unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve

from moefw.compose.spec.source import counted
from moefw.testing.profiles import smoke
from moefw.testing.suites import dispatch_assertions as assertions
from moefw.testing.suites import dispatch_overlap as overlap
from moefw.testing.suites.dispatch_case import DispatchCase
from moefw.testing.suites.dispatch_rows import RowChecks
from moefw.testing.suites.dispatch_run import RefusedError
from moefw.testing.suites.dispatch_watch import groups_opened, kept, recorded


class StateChecks(RowChecks):
    """Checks that calls do not affect each other."""

    def same(self, cases: list[DispatchCase], function: Callable[..., Any], why: str, **how: Any) -> None:
        """Fail if ``function`` returns a pair of unequal movements on some rank."""
        self.each(cases, lambda case: self._unequal(self.ranks(function, case, **how), why))

    def _unequal(self, ranks: Sequence[Any], why: str) -> str | None:
        """First difference in what each rank returned: one pair of movements, a list of them, or by name."""
        for rank, pairs in enumerate(ranks):
            if isinstance(pairs, tuple):
                named = {f"rank {rank}": pairs}
            elif isinstance(pairs, list):
                named = {f"rank {rank}, {number}": pair for number, pair in enumerate(pairs)}
            else:
                named = {f"rank {rank}, {name}": pair for name, pair in pairs.items()}
            fault = self.different(named)
            if fault:
                return f"{fault}: {why}"
        return None

    def test_a_call_does_not_depend_on_those_before(self) -> None:
        """A movement gives the same result before and after another movement, and both results are right."""

        def look(case: DispatchCase) -> str | None:
            pairs = self.twice(case)
            again = [second for _, second in pairs]
            wrong = next(filter(None, (assertion(case, again) for assertion in assertions.ASSERTIONS)), None)
            fault = self.different(pairs) or wrong
            return f"{fault}: a later call on the same dispatcher gives something else" if fault else None

        self.each([*self.some(), *self.some(top_k=1, skew="one"), *self.some(row_alignment=4)], look)

    @smoke
    def test_nothing_on_the_dispatcher_changes_between_calls(self) -> None:
        """The plan and the handle hold all state of a movement. Its classes and its package do not change, either."""

        def look(case: DispatchCase) -> str | None:
            for rank, changed in enumerate(self.ranks(kept, case)):
                if changed:
                    names = ", ".join(changed[:4])
                    return f"rank {rank}: the dispatcher keeps state between calls: {names} changed"
            return None

        self.each(self.some(), look)

    def test_no_group_is_opened_in_a_movement(self) -> None:
        """A group takes connections and milliseconds of the host, and stays open: ``build`` opens it, once."""
        if self.on_threads:
            pytest.skip(f"{self.plugin.name} runs on ranks that are threads, where no process group can be opened")

        def look(case: DispatchCase) -> str | None:
            for rank, counts in enumerate(self.ranks(groups_opened, case)):
                for where, count in zip(("plan", "dispatch and combine"), counts, strict=True):
                    if count:
                        what = f"each {where} opens {counted(count, 'process group')}, by torch.distributed.new_group"
                        fix = "Open it in build, by context.expert_group().subgroup(ranks), which opens each once"
                        return f"rank {rank}: {what}: it takes the host's time and stays open. {fix}"
            return None

        self.each([case for case in self.some() if case.world > 1], look)

    def test_no_tensor_stays_alive_after_a_movement(self) -> None:
        """The number of live tensors does not grow over the second to fourth round."""

        def look(case: DispatchCase) -> str | None:
            for rank, counts in enumerate(self.ranks(overlap.live_tensors, case, cases=[case])):
                if counts and counts[3] > counts[2] > counts[1]:
                    return f"rank {rank}: tensors leak: {counts[1:]} are alive after each micro-batch"
            return None

        self.each(self.some()[-1:], look)

    def undisturbed(self, cases: Sequence[DispatchCase], count: int, orders: Sequence[str]) -> None:
        """Fail if movements in flight give other results than movements in a row."""

        def look(case: DispatchCase) -> str | None:
            in_a_row = self.ranks(overlap.at_once, case, order="in a row", count=count)
            for order in orders:
                at_once = self.ranks(overlap.at_once, case, order=order, count=count)
                for rank, (alone, beside) in enumerate(zip(in_a_row, at_once, strict=True)):
                    pairs = zip(alone, beside, strict=True)
                    named = {f"rank {rank}, movement {number}": pair for number, pair in enumerate(pairs, 1)}
                    fault = self.different(named)
                    if fault:
                        others = "another movement is" if count == 2 else f"{count - 1} other movements are"
                        return f"{fault} when {others} in flight ({order})"
            return None

        self.each(cases, look)

    def test_two_movements_in_flight_do_not_disturb_each_other(self) -> None:
        """Interleaved movements, with their backwards in any order, give the same results as movements in a row."""
        self.undisturbed(self.some(), 2, ("first first", "last first", "together"))

    def test_six_movements_in_flight_do_not_disturb_each_other(self) -> None:
        """As many as a pipeline has: the last one is started before the first is finished."""
        self.undisturbed(self.some(), 6, ("last first",))

    def test_a_scheduler_can_cut_the_graph_of_a_movement(self) -> None:
        """Starts and finishes with separate graphs give the same gradients: ``Pending`` holds all tensors between."""
        why = "with a graph of its own for each start and finish, as a scheduler runs them"
        self.same(self.some(), overlap.in_phases, why)

    def test_a_handle_and_a_plan_can_be_used_again(self) -> None:
        """Combine and redispatch give the same result each time, also after later plans and movements."""
        self.same(self.some(), overlap.handles, "a handle or a plan cannot be used again")

    @smoke
    def test_redispatch_moves_other_values_along_the_same_way(self) -> None:
        """The result equals a dispatch of these values, gradients included."""
        self.same(self.some(), overlap.redispatched, "redispatch of twice the tokens is not a dispatch of them")

    def test_two_dispatchers_do_not_disturb_each_other(self) -> None:
        """They are of different layers and alignments, over the same group."""

        def look(case: DispatchCase) -> str | None:
            second = evolve(case, num_experts=2 * case.num_experts, row_alignment=4, seed=5, top_k=2, dim=32)
            try:
                self.assembly_of(second)
            except RefusedError:
                second = case
            ranks = self.ranks(overlap.side_by_side, case, second=second, other=self.layer_case_of(second))
            return self._unequal(ranks, "a second dispatcher in the process changes what the first gives")

        self.each(self.some(), look)

    def test_a_movement_that_was_given_up_leaves_nothing_behind(self) -> None:
        """An exception in the experts, a plan without a dispatch, a forward without a backward."""
        self.same(self.some(), overlap.after_failures, "a movement that was given up leaves something behind")

    @smoke
    def test_close_may_be_called_twice_and_a_new_one_built(self) -> None:
        """``close`` only frees resources."""
        self.same(self.some(), overlap.reopened, "a dispatcher built after another was closed gives something else")

    @smoke
    def test_inputs_are_left_as_they_are(self) -> None:
        """The caller owns tokens, weights, ids, rows and the gradient of the output."""
        self.holds(self.cases(), assertions.spoiled)

    def test_inputs_may_be_views(self) -> None:
        """Transposed and strided tensors, and expanded gradients, give the same results as contiguous ones."""
        self.same(
            self.some(), overlap.odd_inputs, "views and contiguous tensors of equal values give different results"
        )

    def test_two_runs_give_the_same_bits(self) -> None:
        """A movement has the same bits when the first or the last rank is slow."""
        self.must_repeat()
        if not self.ordered:
            pytest.skip(f"{self.plugin.name} offers repeats=False: rows come in another order each time")

        def look(case: DispatchCase) -> str | None:
            for slow in (0, case.world - 1):
                slowed = [result for result, _, _ in self.ranks(recorded, case, slow=slow)]
                fault = assertions.different(list(zip(self.moved(case), slowed, strict=True)))
                if fault:
                    return f"{fault} in a second run: two runs give different bits"
            return None

        self.each(self.some(), look)

    def test_counts_that_the_host_knows_change_nothing(self) -> None:
        """``plan(counts=...)`` and ``Routing.counts_host`` only save an exchange."""
        why = "counts given on the host lead to other rows than counts that were exchanged"
        self.same(self.some(), overlap.known_counts, f"plan(counts=...): {why}", how="given")
        alike = [evolve(case, tokens=(4,) * case.world, equal=True) for case in self.some()]
        self.same(alike, overlap.known_counts, f"Routing.counts_host: {why}", how="routed")

    def test_counts_that_no_part_asks_for_change_nothing(self) -> None:
        """``Routing.num_rows``, and ``counts`` settled on the device, only save a read: where both are offered."""
        if not {"host", "device"} <= set(self.promised("counts")):
            pytest.skip(f"{self.plugin.name} does not offer counts both on the host and on the device")
        why = "counts that stay on the device lead to other rows than counts on the host"
        self.same([*self.some(), *self.some(dropped=0.0)], overlap.unasked_counts, f"Routing.num_rows: {why}")

    @smoke
    def test_groups_are_padded_to_the_capacity_of_all_source_ranks(self) -> None:
        """``Routing.capacity``, where padded rows are offered."""
        if "padded" not in self.promised("rows"):
            pytest.skip(f"{self.plugin.name} does not offer padded rows")
        cases = [*self.some(padded=True), *self.some(padded=True, row_alignment=4, skew="one")]
        self.holds(cases, *assertions.ASSERTIONS)
