"""The orders of ``torch.distributed.pipelining``, made without ranks: its schedules get stages without modules."""

from __future__ import annotations

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
    stage: Any = SimpleNamespace(num_stages=chunks * ranks, group_size=ranks, group_rank=0)
    order = getattr(schedules, schedule)([stage] * chunks, micro_batches).pipeline_order
    return tuple(
        tuple(Action(one.computation_type.value, one.stage_index, one.microbatch_index) for one in order[rank] if one)
        for rank in range(ranks)
    )
