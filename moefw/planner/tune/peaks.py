"""The most bytes that a schedule holds at a position on pp, from what phases leave and need. Imports no torch.

It plays the schedule as :class:`moefw.planner.measurement.usage.Usage` does, with stages made of measured phases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import frozen

from moefw.core.records import Entry
from moefw.runtime.pipeline.merging import merged
from moefw.runtime.pipeline.timeline import CHANGE_IN_FLIGHT
from moefw.runtime.pipeline.transfers import UNDER_WAY, Receive, Step, taken_by


@frozen(kw_only=True)
class PhaseBytes:
    """What a phase leaves and needs, in bytes, without gradients, operands and what is gathered around all layers.

    ``starts`` and ``finishes``: whether its forward starts or finishes a movement of rows. ``saved``: left by forward
    for backward; ``freed``: by its backward. ``forward`` and ``backward``: the most that is in use while it runs,
    beyond what is there when it begins; weights that are gathered for a pass count there alone. ``reducing``: that of
    its backward from its first reduction of gradients on, and ``reduced``: the input of its last one, which is there
    until the next phase reduces. ``backward`` is then that before; 0: it reduces nothing.
    """

    starts: bool
    finishes: bool
    saved: int
    freed: int
    forward: int
    backward: int
    reducing: int
    reduced: int


@frozen(slots=False)
class StageBytes:
    """A stage as the phases through which it runs, in the order of forward, and the bytes of its gradients."""

    phases: tuple[PhaseBytes, ...]
    gradients: int

    @cached_property
    def saved(self) -> int:
        """Bytes that a micro-batch in flight has left."""
        return sum(phase.saved for phase in self.phases)


@frozen
class Most:
    """Bytes at a moment: left by micro-batches in flight and on the way between stages, of the passes that run, and of
    gradients not there yet.
    """

    saved: int = 0
    passing: int = 0
    missing: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.saved + self.passing - self.missing


def most_at(steps: Sequence[Step], stages: Mapping[int, StageBytes], *, sent: int) -> Most:
    """Bytes of a position when they are most.

    ``steps``: its passes, and the starts of what it receives. ``stages``: its own, by index. ``sent``: bytes from one
    stage to the next, which are there from the start of receiving to the pass that takes them, and once more while they
    are sent on.

    A pass has all gradients if earlier ones have left any, a backward if one of its own stage has. A backward without
    has those of the stages behind.
    """
    in_flight = dict.fromkeys(stages, 0)
    with_gradients: set[int] = set()
    gradients = sum(stage.gradients for stage in stages.values())
    known: dict[object, Sequence[int]] = {}
    most = Most()
    received: set[Receive] = set()
    num_sends = 0
    for entry in steps:
        if isinstance(entry, Receive):
            received.add(entry)
            continue
        received -= {*map(taken_by, entry.passes)}
        held = sum(number * stages[stage].saved for stage, number in in_flight.items())
        held += (len(received) + min(num_sends, UNDER_WAY)) * sent
        kinds = tuple((action.kind, action.stage) for action in entry.passes)
        if kinds not in known:
            known[kinds] = _needs(entry, stages)
        for action, passing in zip(entry.passes, known[kinds], strict=True):
            missing = 0
            if action.kind == "F" and not with_gradients:
                missing = gradients
            elif action.kind != "F" and action.stage not in with_gradients:
                missing = gradients - sum(stages[each].gradients for each in stages if each > action.stage)
            most = max(most, Most(held, passing, missing), key=lambda each: each.total)
        for action in entry.passes:
            num_sends += action.kind != "W"
            in_flight[action.stage] += CHANGE_IN_FLIGHT[action.kind]
            if action.kind in ("B", "I"):
                with_gradients.add(action.stage)
    return most


def _needs(entry: Entry, stages: Mapping[int, StageBytes]) -> Sequence[int]:
    """Most bytes while each pass of an entry runs, beyond those that are there when it begins.

    Phases of a pair alternate. Weight gradients need no more than the pass before them.
    """
    ahead: Sequence[PhaseBytes] = ()
    back: Sequence[PhaseBytes] = ()
    for action in entry.passes:
        if action.kind == "F":
            ahead = stages[action.stage].phases
        elif action.kind in ("B", "I"):
            back = stages[action.stage].phases
    forwards = iter(ahead)
    backwards = reversed(back)
    level = 0
    reduced = 0
    most = {"F": 0, "B": 0}
    for kind in merged(ahead, back):
        if kind == "F":
            phase = next(forwards)
            most[kind] = max(most[kind], level + reduced + phase.forward)
            level += phase.saved
        else:
            phase = next(backwards)
            most[kind] = max(most[kind], level + reduced + phase.backward, level + phase.reducing)
            reduced = phase.reduced or reduced
            level -= phase.freed
    return [most["F" if action.kind == "F" else "B"] for action in entry.passes]
