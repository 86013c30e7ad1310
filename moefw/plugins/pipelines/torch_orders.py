"""The orders of ``torch.distributed.pipelining``, made offline: its schedules get stages without modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, final

from torch.distributed.pipelining import schedules

from moefw.core.records import Action

_KINDS: Final = ("F", "B", "I", "W")


@final
class _Stage:
    """What a schedule reads of a stage before it runs."""

    def __init__(self, stage: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = stage, count, ranks, stage % ranks
        self.is_first, self.is_last = stage == 0, stage == count - 1


@cache
def order_of(schedule: str, chunks: int, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each of ``ranks`` does under a schedule of torch, named by its class, with ``chunks`` stages each.

    Idle time and reductions, of which torch's lists tell too, are left out.
    """
    stages = [_Stage(stage, chunks * ranks, ranks) for stage in range(0, chunks * ranks, ranks)]
    made: Any = getattr(schedules, schedule)
    order = made(stages if chunks > 1 else stages[0], micro_batches, loss_fn=lambda *_: None).pipeline_order
    return tuple(tuple(_actions(order[rank], micro_batches)) for rank in range(ranks))


def _actions(listed: Any, micro_batches: int) -> Iterator[Action]:
    """Yield the passes in a list of torch. With fewer micro-batches than stages, it names some that do not exist."""
    for one in listed:
        for part in () if one is None else one.sub_actions or (one,):
            if str(part.computation_type) in _KINDS and part.microbatch_index < micro_batches:
                yield Action(str(part.computation_type), part.stage_index, part.microbatch_index)  # type: ignore[arg-type]
