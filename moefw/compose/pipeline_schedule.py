"""A pipeline's schedule on so many ranks, and what its steps have, which equal schedules share. Imports no torch."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from moefw.compose.spec.structure import plain
from moefw.core.plugin import PipelinePlugin
from moefw.core.records import Order, Pair
from moefw.runtime.pipeline.timeline import one_by_one

if TYPE_CHECKING:
    from moefw.compose.registry import Registry

REMEMBERED: Final = 1024
"""Steps whose kinds of entries are remembered."""
PAIR: Final = "pair"


def _declared(pipeline: PipelinePlugin) -> tuple[type[PipelinePlugin], str]:
    """Class of a pipeline, and its options as text, as they may be of types that have no hash.

    An option that no text says, such as one that could not be read, is equal to itself alone.
    """
    return type(pipeline), json.dumps(plain(pipeline), sort_keys=True, default=id)


@frozen
class PipelineSchedule:
    """A pipeline on so many ``ranks`` of pp. Those of one class with equal options are equal, as their orders are."""

    pipeline: PipelinePlugin = field(eq=_declared)
    ranks: int
    registry: Registry = field(eq=False, repr=False)

    def order(self, micro_batches: int) -> Order:
        """Passes of each position on pp in a step of so many micro-batches."""
        if self.ranks == 1 and not self.pipeline.merges:
            return [one_by_one(micro_batches)]
        with self.registry.calling(self.pipeline, "order()"):
            return self.pipeline.order(self.ranks, micro_batches)


@lru_cache(REMEMBERED)
def kinds_of_entries(schedule: PipelineSchedule, micro_batches: int) -> frozenset[str]:
    """Kinds of the passes of a step, and ``pair`` if any two of them run beside each other."""
    entries = [entry for listed in schedule.order(micro_batches) for entry in listed]
    pairs = {PAIR for entry in entries if isinstance(entry, Pair)}
    return frozenset(pairs | {action.kind for entry in entries for action in entry.passes})
