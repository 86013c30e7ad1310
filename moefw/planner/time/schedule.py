"""A schedule's lists of passes as a graph, which tells a step's time for any durations of passes. Imports no torch.

It plays the same lists as :func:`moefw.runtime.pipeline.timeline.timeline`, and has way between stages, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Final

from attrs import frozen

from moefw.compose.pipeline_schedule import PipelineSchedule
from moefw.core.records import Order
from moefw.runtime.pipeline.timeline import made, needs

ROUNDS: Final = 2
"""Multiples of a pipeline's positions after which each further micro-batch takes as long as the last."""
REMEMBERED: Final = 512
"""Steps of schedules whose graphs are remembered, each of a few bytes a pass."""

Key = tuple[int, tuple[tuple[str, int], ...]]
"""A position, and the kind and stage of each pass that runs there at a time: what durations depend on."""


@frozen
class Played:
    """An order as a graph: its passes and pairs, called nodes, in an order in which they can run.

    ``kinds``: what durations depend on. ``kind_of``: the number of each node's kind. ``awaited``: for each node, two
    numbers of nodes at other positions that it waits for, counted from 1; 0: the begin of the step. It also waits for
    the node before it at its own position, and with that for all that ran there.
    """

    kinds: tuple[Key, ...]
    kind_of: array[int]
    awaited: tuple[array[int], array[int]]
    positions: int

    @classmethod
    def of(cls, order: Order) -> Played:
        """Graph of an order that can be played to its end."""
        position_of = {action.stage: at for at, listed in enumerate(order) for one in listed for action in one.passes}
        last = max(position_of)
        kinds: dict[Key, int] = {}
        numbers: dict[tuple[str, int, int], int] = {}
        kind_of = array("i")
        awaited = array("i"), array("i")
        done = [0] * len(order)
        moved = True
        while moved:
            moved = False
            for at, entries in enumerate(order):
                while done[at] < len(entries):
                    entry = entries[done[at]]
                    before = [numbers.get(need, 0) for need in needs(entry, last) if position_of[need[1]] != at]
                    if 0 in before:
                        break
                    first, second = (*before, 0, 0)[:2]
                    awaited[0].append(first)
                    awaited[1].append(second)
                    key = at, tuple([(action.kind, action.stage) for action in entry.passes])
                    kind_of.append(kinds.setdefault(key, len(kinds)))
                    numbers.update(dict.fromkeys(map(made, entry.passes), len(kind_of)))
                    done[at] += 1
                    moved = True
        return cls(tuple(kinds), kind_of, awaited, len(order))

    def end(self, durations: list[float], ways: list[float]) -> float:
        """End of the last pass, if passes of each kind take so long, and what they send arrives so much later."""
        positions = [at for at, _ in self.kinds]
        free = [0.0] * self.positions
        arrivals = [0.0]
        for kind, first, second in zip(self.kind_of, *self.awaited, strict=True):
            at = positions[kind]
            start = free[at]
            if arrivals[first] > start:
                start = arrivals[first]
            if arrivals[second] > start:
                start = arrivals[second]
            end = start + durations[kind]
            free[at] = end
            arrivals.append(end + ways[kind])
        return max(free)


@lru_cache(REMEMBERED)
def played(schedule: PipelineSchedule, micro_batches: int) -> Played:
    """Graph of a step of a schedule."""
    return Played.of(schedule.order(micro_batches))


@frozen(slots=False)
class Steady:
    """Time of a step of many micro-batches, from two steps of few: each further one takes as long as the last.

    ``longer`` None: the step itself is played.
    """

    shorter: Played
    longer: Played | None
    between: int = 1
    further: int = 0
    """Micro-batches beyond those of ``shorter``."""

    @classmethod
    def of(cls, graph: Callable[[int], Played], positions: int, micro_batches: int) -> Steady:
        """Time of a step whose graph is ``graph(micro_batches)``."""
        few = ROUNDS * positions
        if micro_batches <= few + positions or micro_batches % positions:
            return cls(graph(micro_batches), None)
        shorter = graph(few)
        longer = graph(few + positions)
        return cls(shorter, longer, between=positions, further=micro_batches - few)

    @cached_property
    def kinds(self) -> tuple[Key, ...]:
        """Kinds of all passes."""
        return tuple(dict.fromkeys([*self.shorter.kinds, *(self.longer.kinds if self.longer else ())]))

    def end(self, duration: Callable[[Key], float], way: Callable[[Key], float]) -> float:
        """Seconds of a step. ``duration``: of a pass or pair at a position; ``way``: of what it sends."""

        def end_of(graph: Played) -> float:
            return graph.end(list(map(duration, graph.kinds)), list(map(way, graph.kinds)))

        first = end_of(self.shorter)
        if self.longer is None:
            return first
        second = end_of(self.longer)
        return first + self.further * (second - first) / self.between
