"""Checks of the results of dispatch and combine: rows, order, padding, sums, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from moefw.compose.spec.source import counted
from moefw.core.facts import ANY
from moefw.testing.profiles import smoke
from moefw.testing.suites import dispatch_assertions as assertions
from moefw.testing.suites.dispatch_case import DispatchCase, large, multiple, unequal, usual
from moefw.testing.suites.dispatch_order import equal_in_some_order
from moefw.testing.suites.dispatch_overlap import permuted, redispatched, same_places, without_gradients
from moefw.testing.suites.dispatch_ranks import any_bits, identity, key_rows, moved, odd_rows, odd_values
from moefw.testing.suites.dispatch_run import DispatcherRunner
from moefw.testing.suites.watch import same_bits

OTHER_PLACES = "redispatch brings rows to other places than the dispatch of its handle"


class RowChecks(DispatcherRunner):
    """Checks of rows and gradients, over worlds, skews, empty ranks, drops, alignments, dtypes and layouts."""

    def cases(self) -> list[DispatchCase]:
        """Usual cases of every world of the profile."""
        return [case for world in self.profile.worlds for case in usual(world)]

    def some(self, **settings: Any) -> list[DispatchCase]:
        """One case of each world, and one with experts in parts for worlds of 2 and 4."""
        cases = [DispatchCase(tokens=unequal(world), dropped=0.2, top_k=3, seed=7) for world in self.profile.worlds]
        cases += [evolve(case, etp=2, seed=8) for case in cases if case.world in (2, 4)]
        return [evolve(case, **settings) for case in cases]

    @smoke
    def test_tensors_have_the_shapes_and_dtypes_of_the_contract(self) -> None:
        """Rows and outputs in the tokens' dtype, weights fp32, counts int32."""
        self.holds(self.cases(), assertions.form)

    @smoke
    def test_counts_offsets_and_host_counts_are_those_of_the_routing(self) -> None:
        """Dropped choices are not counted; groups are padded to the alignment; host and device counts are equal."""
        self.holds(self.cases(), assertions.groups)

    @smoke
    def test_the_host_knows_the_counts_where_that_is_offered(self) -> None:
        """An offer of counts on the host means that ``counts_host`` is not None."""
        if "host" not in self.promised("counts"):
            pytest.skip(f"{self.plugin.name} offers no counts on the host")

        def look(case: DispatchCase) -> str | None:
            for rank, result in enumerate(self.moved(case)):
                if result.counts_host is None:
                    return f"rank {rank}: counts on the host are offered and counts_host is None"
            return None

        self.each(self.some(), look)

    @smoke
    def test_rows_come_in_order_of_expert_source_rank_and_token(self) -> None:
        """Each row is its token, bit for bit."""
        self.holds(self.cases(), assertions.form, assertions.groups, assertions.order)

    @smoke
    def test_rows_are_moved_bit_for_bit_whatever_they_hold(self) -> None:
        """NaN, infinities, minus zero, denormals."""
        same = same_bits if self.ordered else equal_in_some_order

        def look(case: DispatchCase) -> str | None:
            for rank, rows_RD in enumerate(self.ranks(odd_rows, case)):
                sent = [odd_values(case, source) for source in range(case.world)]
                begin = 0
                for rows in case.arrivals(rank):
                    due = [sent[source][token] for source, token, _ in rows]
                    got_RD = rows_RD[begin : begin + len(rows)]
                    begin += len(rows)
                    if due and not same(got_RD, torch.stack(due)):
                        return f"rank {rank}: rows with NaN, infinities or denormals are not moved bit for bit"
            return None

        self.each(self.some() + self.some(dtype="bf16"), look)

    @smoke
    def test_redispatch_brings_rows_to_the_places_of_their_dispatch(self) -> None:
        """Where no order is promised, too: in backward, each row meets what the experts saved for its place."""

        def look(case: DispatchCase) -> str | None:
            fault = assertions.different(self.ranks(same_places, case))
            return f"{fault}: {OTHER_PLACES}" if fault else None

        self.each([*self.some(), *self.some(row_alignment=4)], look)

    @smoke
    def test_rows_of_keys_are_redispatched_bit_for_bit(self) -> None:
        """A plugin that offers ``row_keys`` moves any bf16 bits to the places of dispatch's rows; padding is zero."""
        self.promised("row_keys")

        def look(case: DispatchCase) -> str | None:
            for rank, keys in enumerate(self.ranks(key_rows, case)):
                if keys.redispatched != keys.dispatched:
                    return f"rank {rank}: {OTHER_PLACES}"
                sent = [any_bits(case, source, keys.columns) for source in range(case.world)]
                due_RD = torch.zeros_like(keys.rows_RD)
                for place, origin in enumerate(keys.dispatched):
                    if origin is not None:
                        source, token = origin
                        due_RD[place] = sent[source][token]
                if keys.rows_RD.dtype != torch.bfloat16:
                    return f"rank {rank}: row_keys is offered, and its rows are {keys.rows_RD.dtype}, not bf16"
                if not same_bits(keys.rows_RD, due_RD):
                    return f"rank {rank}: row_keys is offered, and rows of keys are not redispatched bit for bit"
            return None

        self.each(self.some() + self.some(row_alignment=4), look)

    @smoke
    def test_each_row_carries_the_weight_of_its_choice(self) -> None:
        """Bit for bit; a weight may be negative, or 0 although its token is sent."""
        self.holds(self.cases(), assertions.form, assertions.groups, assertions.weights)

    @smoke
    def test_rows_that_pad_a_group_are_zero_with_weight_zero(self) -> None:
        """Up to the alignment that was negotiated."""
        self.holds(self.cases(), assertions.form, assertions.groups, assertions.padding)

    def test_combine_of_dispatch_gives_each_token_once_for_every_kept_choice(self) -> None:
        """Experts return their rows, and sums of values are exact; split experts give a sum of copies."""

        def look(case: DispatchCase) -> str | None:
            whole = evolve(case, whole=True, dropped=max(case.dropped, 0.2))
            for rank, out_TD in enumerate(self.ranks(identity, whole)):
                times_T = (whole.ids(rank) >= 0).sum(1) * whole.etp
                error_TD = out_TD.double() - times_T.unsqueeze(1) * whole.x(rank).double()
                is_wrong_T = (~(error_TD == 0)).any(1)  # NaN is wrong, too
                if is_wrong_T.any():
                    token = int(is_wrong_T.nonzero()[0])
                    times = counted(int(times_T[token]), "time")
                    what = f"token {token} does not come back {times}, once for every kept choice"
                    return f"rank {rank}: {what} and part of an expert"
            return None

        few_experts = [evolve(case, top_k=1, num_experts=multiple(case.ep, of_at_least=4)) for case in self.some()]
        self.each([*self.some(), *few_experts, *self.some(skew="one", dtype="bf16")], look)

    @smoke
    def test_combine_of_dispatch_is_the_sum_of_what_the_experts_give(self) -> None:
        """Only the experts apply the weights."""
        self.holds(self.cases(), assertions.form, assertions.groups, assertions.output)

    @smoke
    def test_rows_get_the_gradients_of_their_tokens_outputs(self) -> None:
        """Bit for bit: the dual of a sum is a copy."""
        self.holds(self.cases(), assertions.groups, assertions.row_gradients)

    @smoke
    def test_gradients_of_tokens_and_weights_are_the_true_ones(self) -> None:
        """Over all experts of a token, on any rank."""

        def look(case: DispatchCase) -> str | None:
            ranks = self.moved(case)
            return assertions.presence(case, ranks, wants="xw") or assertions.gradients(case, ranks)

        self.each(self.cases(), look)

    def test_weights_alone_and_tokens_alone_get_their_gradients(self) -> None:
        """The other input is frozen."""

        def look(case: DispatchCase) -> str | None:
            for wants in ("w", "x"):
                ranks = self.ranks(moved, case, wants=wants)
                fault = (
                    assertions.presence(case, ranks, wants=wants)
                    or assertions.gradients(case, ranks)
                    or assertions.output(case, ranks)
                )
                if fault:
                    alone = "the routing weights" if wants == "w" else "the tokens"
                    return f"{fault} (only {alone} want a gradient)"
            return None

        self.each(self.some() + self.some(skew="one", dropped=0.0), look)

    @smoke
    def test_without_gradients_nothing_is_saved_and_nothing_changes(self) -> None:
        """Under ``torch.no_grad``, as in evaluation."""

        def look(case: DispatchCase) -> str | None:
            for rank, (with_gradients, without, faults) in enumerate(self.ranks(without_gradients, case)):
                if faults:
                    return f"rank {rank}: under torch.no_grad {faults[0]}"
                fault = self.different({f"rank {rank}": (with_gradients, without)})
                if fault:
                    return f"{fault} under torch.no_grad"
            return None

        self.each(self.some(), look)

    def test_thousands_of_wide_rows_are_moved_as_few_narrow_ones(self) -> None:
        """All of the above, and a redispatch, of 2,000 tokens of one rank, most of them for one of many experts."""

        def look(case: DispatchCase) -> str | None:
            ranks = self.moved(case)
            wrong = (assertion(case, ranks) for assertion in assertions.ASSERTIONS)
            fault = next(filter(None, wrong), None) or assertions.presence(case, ranks, wants="xw")
            return fault or self.different(self.ranks(redispatched, case))

        offered = self.offers().get("row_alignment", (1,))
        row_alignment = 128 if offered == ANY else max(1, *offered)
        self.each([case for world in self.profile.worlds for case in large(world, row_alignment=row_alignment)], look)

    def test_padding_and_undefined_rows_are_never_read(self) -> None:
        """NaN in rows that pad a group, and past the last group, changes no output and no gradient."""

        def look(case: DispatchCase) -> str | None:
            pairs = list(zip(self.moved(case), self.ranks(moved, case, padding=float("nan")), strict=True))
            fault = self.different(pairs)
            return f"{fault} when the rows that pad groups hold NaN: combine reads padding" if fault else None

        self.each([*self.some(row_alignment=4), *self.some(row_alignment=16, skew="starved")], look)

    def test_the_order_of_tokens_does_not_matter(self) -> None:
        """Permuted tokens give the permuted output."""

        def look(case: DispatchCase) -> str | None:
            for rank, (shuffled_TD, straight_TD) in enumerate(self.ranks(permuted, case)):
                same = same_bits(shuffled_TD, straight_TD) if self.exact else torch.allclose(shuffled_TD, straight_TD)
                if not same:
                    return f"rank {rank}: tokens in another order get other outputs"
            return None

        self.each(self.some(), look)
