"""Checks of a static budget: the number of rows does not depend on the routing, and overflow is reported."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from moefw.compose.assembly import Assembly
from moefw.testing.suites.dispatch_case import SKEWS, DispatchCase
from moefw.testing.suites.dispatch_ranks import opened
from moefw.testing.suites.dispatch_run import DispatcherRunner


def budgeted(group: Any, rank: int, case: DispatchCase, assembly: Assembly) -> list[tuple[int, int, int, float, int]]:
    """Return for each skew the rows: all, valid, due by the routing, reported as dropped, valid if dropless."""
    found = []
    with opened(group, case, assembly) as moves:
        for seed, skew in enumerate(SKEWS):
            one = evolve(case, skew=skew, seed=seed)
            batch, _ = moves.dispatch(one.x(rank), one.weights(rank), moves.plan(one.routing(rank)))
            said = sum(float(batch.stats.get(name, 0.0)) for name in ("overflow", "dropped_rows"))
            whole, _ = moves.dispatch(one.x(rank), one.weights(rank), moves.plan(one.routing(rank), dropless=True))
            due = sum(len(rows) for rows in one.arrivals(rank))
            found.append((len(batch.rows_RD), int(batch.counts_e.sum()), due, said, int(whole.counts_e.sum())))
    return found


class StaticChecks(DispatcherRunner):
    """Checks of dispatchers that offer only static rows."""

    def test_a_static_budget_holds_whatever_the_routing(self) -> None:
        """And a step that is repeated without it, ``dropless``, drops no rows."""
        if tuple(self.offers().get("rows", ())) != ("static",):
            pytest.skip(f"{self.plugin.name} does not offer static rows alone")

        def look(case: DispatchCase) -> str | None:
            for rank, seen in enumerate(self.ranks(budgeted, case)):
                if len({rows for rows, *_ in seen}) > 1:
                    return f"rank {rank}: static rows are offered, and there are {[rows for rows, *_ in seen]} rows"
                for skew, (_, valid, due, said, whole) in zip(SKEWS, seen, strict=True):
                    if whole != due:
                        return f"rank {rank}: dropless is ignored: {whole} of {due} rows arrive with {skew} routing"
                    if valid + said != due:
                        what = f"{valid} of {due} rows arrive and stats say that {said:g} were left out"
                        return f"rank {rank}: {what}: overflow or dropped_rows with {skew} routing"
            return None

        self.each([DispatchCase(tokens=(6,) * world, top_k=3) for world in self.profile.worlds], look)
