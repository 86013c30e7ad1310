"""Rows that ``ElasticBuffer`` groups by expert as they arrive (``do_expand``), in an order of its own.

The library copies a token that arrived to the next free row of each of its experts' groups, and clears the rows that
an alignment leaves over. Its combine adds up a token's rows here before it sends their sum. So nothing is sorted, no
rows are gathered before the experts, and none are added up behind them.

Atomic counters hand out the rows of a group, in another order each time. ``deterministic`` would put them in order by
masks, for which the host waits until rows have arrived. A handle records the places: along it, rows take them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, final

from torch import Tensor

from moefw.plugins.dispatchers.deepep.elastic import Elastic
from moefw.plugins.dispatchers.deepep.wire import Arrived, Choices, Expansion
from moefw_kernels.permute import Groups, group_chunks


@final
class GroupedWire(Elastic):
    """One row for each (token, expert of the rank), grouped by expert in any order, padded with zero rows."""

    deterministic: ClassVar[bool] = False
    layout: ClassVar[Mapping[str, Any]] = {"do_expand": True, "do_zero_padding": True}

    def send(self, x_TD: Tensor, weights_TK: Tensor, choices: Choices) -> Arrived:
        """Dispatch. The library pads groups to their alignment, but not to a capacity."""
        rows_RD, _, weights_R, handle, work = self.dispatched(
            x_TD,
            topk_idx=choices.ids_TK,
            topk_weights=weights_TK,
            expert_alignment=1 if choices.capacity else choices.alignment,
        )
        expansion = partial(in_groups, handle, choices)
        return Arrived(rows=rows_RD, weights=weights_R, expansion=expansion, handle=handle, work=work)


def in_groups(handle: Any, choices: Choices) -> Expansion:
    """Expansion of grouped rows: none, or padding to a capacity. The host knows the sizes already."""
    sizes = handle.num_recv_tokens_per_expert_list
    counts_e = handle.num_unaligned_recv_tokens_per_expert
    if choices.capacity:
        groups = group_chunks([sizes], choices.alignment, counts_e.device, capacity=choices.capacity)
    else:
        ends_e = _aligned(handle.psum_num_recv_tokens_per_expert, choices.alignment)
        groups = Groups(None, tuple(sizes), counts_e, ends_e)
    return Expansion(groups, groups.regroup, groups.restore)


def _aligned(ends_e: Tensor, alignment: int) -> Tensor:
    """Where groups end, given where their valid rows end. Each group begins at a multiple of ``alignment``."""
    if alignment == 1:
        return ends_e
    return (ends_e + (alignment - 1)) // alignment * alignment
