"""The orders of ``torch.distributed.pipelining``, made without ranks: its schedules get stages without modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from moefw.core.records import Action


@cache
def order_of(schedule: str, chunks: int, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each of ``ranks`` does under a schedule of torch, named by its class, with ``chunks`` stages each.

    Raises ValueError if torch does. The orders with one stage a rank are not from here: the list of ``Schedule1F1B``
    lacks the forward of micro-batch 0 on the last rank (torch 2.11 to 2.13).
    """
    stage: Any = SimpleNamespace(num_stages=chunks * ranks, group_size=ranks, group_rank=0, submod=None)
    order = getattr(schedules, schedule)([stage] * chunks, micro_batches).pipeline_order
    return tuple(tuple(map(_action, _passes(order[rank]))) for rank in range(ranks))


def _passes(listed: Any) -> Iterator[Any]:
    """Yield the passes in a list of torch, without idle time. Two that overlap are one entry there."""
    for one in listed:
        if one is not None:
            yield from one.sub_actions or (one,)


def _action(one: Any) -> Action:
    return Action(one.computation_type.value, one.stage_index, one.microbatch_index)
