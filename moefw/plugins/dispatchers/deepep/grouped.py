"""Rows that ``ElasticBuffer`` groups by expert as they arrive (``do_expand``), in an order of its own.

The library copies a token that arrived to the next free row of each of its experts' groups, and clears the rows that
an alignment leaves over. Its combine adds up a token's rows here before it sends their sum. So nothing is sorted, no
rows are gathered before the experts, and none are added up behind them.

Atomic counters hand out the rows of a group, in another order in each run. ``deterministic`` would put them in order by
masks, for which the host waits until rows have arrived. A handle records the places: along it, rows take them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, final

from torch import Tensor

import moefw
from moefw.plugins.dispatchers.deepep.elastic import Elastic
from moefw.plugins.dispatchers.deepep.wire import Arrived, Choices


@final
@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The library's groups: their sizes on the host; their valid rows and aligned ends on the device, int32."""

    sizes: tuple[int, ...]
    counts_e: Tensor
    offsets_e: Tensor

    @classmethod
    def of(cls, handle: Any) -> Self:
        """Return the groups of a dispatch. The host does not wait: it has done so for the sizes.

        The handle has each expert's last valid row plus one (``psum_num_recv_tokens_per_expert``): its group ends at
        the next multiple of the alignment.
        """
        ends_e, alignment = handle.psum_num_recv_tokens_per_expert, handle.expert_alignment
        return cls(
            sizes=tuple(handle.num_recv_tokens_per_expert_list),
            counts_e=handle.num_unaligned_recv_tokens_per_expert,
            offsets_e=ends_e if alignment == 1 else (ends_e + (alignment - 1)) // alignment * alignment,
        )

    def expand(self, rows_RD: Tensor, weights_R: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return the rows and weights as they arrived."""
        return rows_RD, weights_R

    def reduce(self, rows_RD: Tensor, /) -> Tensor:
        """Return the rows: combine adds them up."""
        return rows_RD


@final
class GroupedWire(Elastic):
    """One row for each (token, expert of the rank), grouped by expert in any order, padded with zero rows."""

    deterministic: ClassVar[bool] = False
    layout: ClassVar[Mapping[str, Any]] = {"do_expand": True, "do_zero_padding": True}

    def send(self, x_TD: Tensor, weights_TK: Tensor, choices: Choices) -> Arrived:
        """Dispatch. Raises ContractError on a capacity, and on more tokens than the buffer was created for."""
        if choices.capacity:
            what = "DeepEP pads groups that it makes to an alignment, and the router wants them padded to a capacity."
            raise moefw.ContractError(what, "Route without a capacity that pads, or leave grouped out.")
        rows_RD, _, weights_R, handle, work = self.dispatched(
            x_TD, topk_idx=choices.ids_TK, topk_weights=weights_TK, expert_alignment=choices.alignment
        )
        return Arrived(rows=rows_RD, weights=weights_R, expansion=partial(Groups.of, handle), handle=handle, work=work)
