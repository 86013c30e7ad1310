"""Checks of communication: which collectives, and when they are waited for."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from moefw.testing.profiles import smoke
from moefw.testing.suites.dispatch_case import DispatchCase, unequal
from moefw.testing.suites.dispatch_recording import Event
from moefw.testing.suites.dispatch_run import DispatcherRunner
from moefw.testing.suites.dispatch_watch import recorded, sent_again, under_way

UNSEEN = "none of its collectives is an operator of PyTorch, so they cannot be recorded"


class WireChecks(DispatcherRunner):
    """Checks of every rank's collectives, recorded at PyTorch's operators."""

    def worlds(self, **settings: Any) -> list[DispatchCase]:
        """Cases on several ranks: unequal and empty ones, drops, experts in parts, one rank per node."""
        cases = []
        for world in self.profile.worlds:
            if world == 1:
                continue
            base = DispatchCase(tokens=unequal(world), dropped=0.3, top_k=3, seed=11)
            cases += [base, evolve(base, tokens=(0,) * (world - 1) + (2,)), evolve(base, dropped=1.0)]
            cases += [evolve(base, skew="one", ranks_per_node=1), evolve(base, skew="far")]
            if world % 2 == 0:
                cases.append(evolve(base, etp=2))
        if not cases:
            pytest.skip("a world of one rank sends nothing")
        return [evolve(case, **settings) for case in cases]

    def test_every_rank_makes_the_same_collectives(self) -> None:
        """In the same order, independent of its own tokens; shapes agree where they must."""

        def look(case: DispatchCase) -> str | None:
            logs = [_collective_launches(events) for _, events, _ in self.ranks(recorded, case)]
            for rank, log in enumerate(logs[1:], 1):
                fault = _unlike(logs[0], log, rank)
                if fault:
                    return fault
            return None

        self.each(self.worlds(), look)

    def test_no_buffer_is_read_before_its_collective_is_awaited(self) -> None:
        """Results that arrive only at the wait change nothing; inputs are not overwritten before the wait."""

        def look(case: DispatchCase) -> str | None:
            ranks = self.ranks(recorded, case, late=True)
            for rank, (_, _, overwritten) in enumerate(ranks):
                if overwritten:
                    return f"rank {rank}: what the {overwritten[0]} sends is overwritten before it was awaited"
            late = [result for result, _, _ in ranks]
            fault = self.different(list(zip(self.moved(case), late, strict=True)))
            return f"{fault}: a buffer is read before the collective that fills it was awaited" if fault else None

        self.each(self.worlds(), look)

    @smoke
    def test_movements_are_under_way_between_start_and_finish(self) -> None:
        """In forward and backward: finish's backward launches the dual, start's backward waits for it."""

        def look(case: DispatchCase) -> str | None:
            for rank, counts in enumerate(self.ranks(under_way, case)):
                if not counts["launched"]:
                    pytest.skip(UNSEEN)
                for start in ("start_dispatch", "start_combine", "start_redispatch"):
                    if not counts[start]:
                        return f"rank {rank}: nothing is under way after {start}: it waits, so nothing overlaps"
                for finish in ("plan", "finish_dispatch", "finish_combine", "the end"):
                    if counts[finish]:
                        return f"rank {rank}: {counts[finish]} collectives were never waited for by {finish}"
                for movement in ("dispatch", "combine"):
                    if not counts.get(f"backward of {movement}"):
                        what = f"nothing is under way in the backward of work between start and finish of {movement}"
                        return f"rank {rank}: {what}: finish's backward does not start the dual, so nothing overlaps"
            return None

        worlds = dict.fromkeys(case.world for case in self.worlds())
        # Every rank has tokens to send.
        cases = [DispatchCase(tokens=tuple(3 + rank for rank in range(world)), seed=5) for world in worlds]
        self.each(cases, look)

    def test_redispatch_exchanges_no_metadata(self) -> None:
        """It launches the same collectives as dispatch, on rows and weights, and does not call plan."""

        def look(case: DispatchCase) -> str | None:
            for rank, (first, second, plans) in enumerate(self.ranks(sent_again, case)):
                metadata = [event for event in second if "int" in event.dtype or "bool" in event.dtype]
                if plans or metadata:
                    what = f"launches {metadata[0]}" if metadata else "calls plan"
                    return f"rank {rank}: redispatch exchanges metadata again: it {what}"
                if [event.alike() for event in first] != [event.alike() for event in second]:
                    what = f"{_listed(second)} instead of {_listed(first)}"
                    return f"rank {rank}: redispatch launches other collectives than dispatch: {what}"
            return None

        self.each(self.worlds(), look)


def _collective_launches(events: list[Event]) -> list[Event]:
    """Launches in which all ranks take part: no sends and no receives."""
    return [event for event in events if event.what == "launch" and event.kind not in ("send", "recv")]


def _unlike(first: list[Event], log: list[Event], rank: int) -> str | None:
    """Where the collectives of a rank are not those of rank 0."""
    for number, (a, b) in enumerate(zip(first, log)):
        if a.alike() != b.alike():
            return f"collective {number} is a {a} on rank 0 and a {b} on rank {rank}: the order differs between ranks"
    if len(first) != len(log):
        return f"rank 0 makes {len(first)} collectives and rank {rank} makes {len(log)}"
    return None


def _listed(events: list[Event]) -> str:
    return ", ".join(map(str, events)) or "nothing"
