"""The orders of ``torch.distributed.pipelining``, made without ranks: its schedules get stages without modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from moefw.core.records import Action, Entry, Pair


@cache
def order_of(
    schedule: str, chunks: int, ranks: int, micro_batches: int, *, merged: bool = False
) -> tuple[tuple[Entry, ...], ...]:
    """Passes of each of ``ranks``, with ``chunks`` stages each, under torch's schedule of this class name.

    ``merged``: a forward and a backward that overlap in torch's schedule are a pair; otherwise one follows the other.
    Raises ValueError if torch does. The orders with one stage a rank are not from here: the list of ``Schedule1F1B``
    lacks the forward of micro-batch 0 on the last rank (torch 2.11 to 2.13). Nor is ``interleaved``.
    """
    stage: Any = SimpleNamespace(num_stages=chunks * ranks, group_size=ranks, group_rank=0, submod=None)
    order = getattr(schedules, schedule)([stage] * chunks, micro_batches).pipeline_order
    return tuple(tuple(_passes(order[rank], merged=merged)) for rank in range(ranks))


def _passes(entries: Any, *, merged: bool) -> Iterator[Entry]:
    """Yield the passes in torch's list of a rank, without idle time, None there. Two that overlap are one entry."""
    for entry in entries:
        if entry is None:
            continue
        passes = [
            Action(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in entry.sub_actions or (entry,)
        ]
        if merged and len(passes) > 1:
            forward, backward = passes
            yield Pair(forward, backward)
        else:
            yield from passes
