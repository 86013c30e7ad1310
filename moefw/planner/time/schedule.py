"""A schedule's lists of passes as a graph, which tells a step's time for any durations of passes. Imports no torch.

It plays the same lists as :func:`moefw.runtime.pipeline.timeline.timeline`, and has way between stages, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Final

from attrs import frozen

from moefw.core.records import Action, Entry, Order
from moefw.runtime.pipeline.timeline import made, needs

ROUNDS: Final = 2
"""Multiples of a pipeline's positions after which each further micro-batch takes as long as the last."""


Key = tuple[int, tuple[tuple[str, int], ...]]
"""A position, and the kind and stage of each pass that runs there at a time: what durations depend on."""


@frozen
class Node:
    """A pass or a pair: of which ``kind`` it is, and the nodes before it, with whether there is way between."""

    kind: int
    before: tuple[tuple[int, bool], ...]


@frozen
class Played:
    """An order as a graph. ``kinds``: those of its nodes."""

    kinds: tuple[Key, ...]
    nodes: tuple[Node, ...]
    positions: int

    @classmethod
    def of(cls, order: Order) -> Played:
        """Graph of an order that can be played to its end."""
        last = max(action.stage for entries in order for entry in entries for action in entry.passes)
        kinds: dict[Hashable, int] = {}
        numbers: dict[tuple[str, int, int], int] = {}
        at_of: dict[tuple[str, int, int], int] = {}
        nodes: list[Node] = []
        done = [0] * len(order)
        latest = [-1] * len(order)
        moved = True
        while moved:
            moved = False
            for at, entries in enumerate(order):
                while done[at] < len(entries):
                    entry = entries[done[at]]
                    own = set(map(made, entry.passes))
                    waits = [need for need in needs(entry, last) if need not in own]
                    if any(need not in numbers for need in waits):
                        break
                    kind = kinds.setdefault((at, _kinds_of(entry)), len(kinds))
                    before = [(numbers[need], at_of[need] != at) for need in waits]
                    if latest[at] >= 0:
                        before.append((latest[at], False))
                    for what in own:
                        numbers[what] = len(nodes)
                        at_of[what] = at
                    latest[at] = len(nodes)
                    nodes.append(Node(kind, tuple(before)))
                    done[at] += 1
                    moved = True
        return cls(tuple(kinds), tuple(nodes), len(order))  # type: ignore[arg-type]

    def end(self, durations: list[float], way: float) -> float:
        """End of the last pass, if passes of each kind take so long, and the way between positions ``way``."""
        ends: list[float] = []
        for node in self.nodes:
            start = 0.0
            for number, is_away in node.before:
                ready = ends[number] + way if is_away else ends[number]
                if ready > start:
                    start = ready
            ends.append(start + durations[node.kind])
        return max(ends)


def _kinds_of(entry: Entry) -> tuple[tuple[str, int], ...]:
    passes: tuple[Action, ...] = entry.passes
    return tuple((action.kind, action.stage) for action in passes)


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
    def of(cls, order: Callable[[int], Order], positions: int, micro_batches: int) -> Steady:
        """Time of a step whose order is ``order(micro_batches)``."""
        few = ROUNDS * positions
        if micro_batches <= few + positions or micro_batches % positions:
            return cls(Played.of(order(micro_batches)), None)
        shorter = Played.of(order(few))
        longer = Played.of(order(few + positions))
        return cls(shorter, longer, between=positions, further=micro_batches - few)

    @cached_property
    def kinds(self) -> tuple[Key, ...]:
        """Kinds of all passes."""
        return tuple(dict.fromkeys([*self.shorter.kinds, *(self.longer.kinds if self.longer else ())]))

    def end(self, duration: Callable[[int, tuple[tuple[str, int], ...]], float], way: float) -> float:
        """Seconds of a step. ``duration``: of a pass or pair at a position."""
        first = self.shorter.end([duration(*kind) for kind in self.shorter.kinds], way)
        if self.longer is None:
            return first
        second = self.longer.end([duration(*kind) for kind in self.longer.kinds], way)
        return first + self.further * (second - first) / self.between
