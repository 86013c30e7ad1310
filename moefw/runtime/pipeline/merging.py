"""The order in which a rank runs the phases of a forward beside those of another micro-batch's backward.

It follows from what phases declare alone, so all ranks that share experts have the same order. Two MoE layers, with '
for backward:

    collect'  attend  compute'  receive'  receive  compute  attend'  collect'  collect  attend  compute'  ...

Between the start of a movement and its finish lies work of the other micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

PassKind = Literal["F", "B"]


class Moving(Protocol):
    """What a phase declares of movements of rows, as :class:`moefw.runtime.phases.Phase` does."""

    @property
    def starts(self) -> bool:
        """Whether forward starts a movement."""

    @property
    def finishes(self) -> bool:
        """Whether forward waits for a movement."""


def merged(forward: Sequence[Moving], backward: Sequence[Moving]) -> tuple[PassKind, ...]:
    """Pass to which each next phase belongs, for a forward and a backward that run through these phases.

    Both are given in the order of forward. Of the two next phases that one runs which waits for no movement; if both
    wait, the one whose movement was started first; if neither does, the backward.
    """
    order: list[PassKind] = []
    ahead = list(forward)
    back = list(reversed(backward))
    started = {"F": 0, "B": 0}
    """When the latest movement of each pass was started, in phases from the begin."""
    while ahead and back:
        backward_runs = not back[0].starts or (ahead[0].finishes and started["B"] <= started["F"])
        if backward_runs:
            phase = back.pop(0)
            starts_movement = phase.finishes  # the dual movement
        else:
            phase = ahead.pop(0)
            starts_movement = phase.starts
        order.append("B" if backward_runs else "F")
        if starts_movement:
            started[order[-1]] = len(order)
    order += ["B"] * len(back)
    order += ["F"] * len(ahead)
    return tuple(order)
