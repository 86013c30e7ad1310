"""Checks of a static budget: the number of rows does not depend on the routing, and overflow is reported."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve, frozen

from moefw.compose.assembly import Assembly
from moefw.testing.profiles import smoke
from moefw.testing.suites.dispatch_case import SKEWS, DispatchCase
from moefw.testing.suites.dispatch_ranks import opened
from moefw.testing.suites.dispatch_run import DispatcherRunner


@frozen
class Budgeted:
    """Numbers of rows of a rank: all, valid, due by the routing, reported as left out, and valid if dropless."""

    rows: int
    valid: int
    due: int
    left_out: float
    valid_if_dropless: int


def budgeted(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> list[Budgeted]:
    """Numbers of rows for each skew of the routing."""
    by_skew = []
    with opened(group, case, assembly) as dispatcher:
        for seed, skew in enumerate(SKEWS):
            skewed = evolve(case, skew=skew, seed=seed)
            plan = dispatcher.plan(skewed.routing(rank))
            batch, _ = dispatcher.dispatch(skewed.x(rank), skewed.weights(rank), plan)
            dropless_plan = dispatcher.plan(skewed.routing(rank), dropless=True)
            dropless_batch, _ = dispatcher.dispatch(skewed.x(rank), skewed.weights(rank), dropless_plan)
            by_skew.append(
                Budgeted(
                    rows=len(batch.rows_RD),
                    valid=int(batch.counts_e.sum()),
                    due=sum(len(rows) for rows in skewed.arrivals(rank)),
                    left_out=sum(float(batch.stats.get(name, 0.0)) for name in ("overflow", "dropped_rows")),
                    valid_if_dropless=int(dropless_batch.counts_e.sum()),
                )
            )
    return by_skew


class StaticChecks(DispatcherRunner):
    """Checks of dispatchers that offer only static rows."""

    @smoke
    def test_a_static_budget_holds_whatever_the_routing(self) -> None:
        """The number of rows is the same for every routing. A step that is repeated ``dropless`` drops none of them."""
        if tuple(self.offers().get("rows", ())) != ("static",):
            pytest.skip(f"{self.plugin.name} does not offer static rows alone")

        def look(case: DispatchCase) -> str | None:
            for rank, by_skew in enumerate(self.ranks(budgeted, case)):
                rows = [numbers.rows for numbers in by_skew]
                if len(set(rows)) > 1:
                    return f"rank {rank}: static rows are offered, and there are {rows} rows"
                for skew, numbers in zip(SKEWS, by_skew, strict=True):
                    due = numbers.due
                    if numbers.valid_if_dropless != due:
                        arrive = f"{numbers.valid_if_dropless} of {due} rows arrive"
                        return f"rank {rank}: dropless is ignored: {arrive} with {skew} routing"
                    if numbers.valid + numbers.left_out != due:
                        arrive = f"{numbers.valid} of {due} rows arrive"
                        what = f"{arrive} and stats say that {numbers.left_out:g} were left out"
                        return f"rank {rank}: {what}: overflow or dropped_rows with {skew} routing"
            return None

        self.each([DispatchCase(tokens=(6,) * world, top_k=3) for world in self.profile.worlds], look)
