"""The tokens of a micro-batch whose ranks of cp and tp share it: each has a part, and some routers need all of them.

The order of a micro-batch is that of its sequences, and of the positions in each; no split of it changes this order.
``N`` are the tokens of all ranks that share it, padding included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.context import BuildContext
from moefw.core.stages import Batch
from moefw.runtime.communication.gather import all_gather
from moefw.runtime.parallel.cp_blocks import PIECES_OF_A_RANK

TokenGroups = Mapping[int | None, ProcessGroup | None]
"""The group of the ranks that share a micro-batch, by ``Batch.cp``. None: a rank has whole micro-batches."""

ALONE: Final[TokenGroups] = {None: None}


def token_groups(context: BuildContext) -> TokenGroups:
    """Groups of the ranks that share a micro-batch, of the layer's layout."""
    return {cp: layout.group("cp", "tp") for cp, layout in context.layouts.items()}


def index_in_micro_batch(batch: Batch, num_tokens: int, group: ProcessGroup | None) -> Tensor:
    """Where in the micro-batch each of this rank's ``num_tokens`` tokens is: ``(T)`` int64, below N."""
    rows = len(batch.ids_BS)
    if group is None or not rows:
        return torch.arange(num_tokens, device=batch.ids_BS.device)
    row_length = num_tokens * group.size() // rows
    first_B = torch.arange(rows, device=batch.ids_BS.device) * row_length
    return batch.own((first_B.unsqueeze(1) + batch.row_places).flatten())


def run_length(batch: Batch, num_tokens: int) -> int:
    """Number that divides where each run of neighbouring tokens begins and ends, on every rank.

    ``num_tokens`` are this rank's. With cp, a sequence is cut into pieces; with tp, a rank's pieces are cut again. Not
    for packs.
    """
    if batch.places_S is None:
        return num_tokens
    return math.gcd(num_tokens, len(batch.places_S) // PIECES_OF_A_RANK)


@final
class WholeMicroBatch:
    """Values of all tokens of a micro-batch, ``(N, ...)``, from the parts of the ranks in ``group``, and back.

    The ranks have equally many tokens. Collective over them: so is :meth:`of`. Nothing is sent if ``group`` is None.
    No gradient flows through it.
    """

    def __init__(self, batch: Batch, num_tokens: int, group: ProcessGroup | None) -> None:
        self._group = group
        if group is not None:
            by_rank_N = _gathered(index_in_micro_batch(batch, num_tokens, group), group)
            self._order_N = by_rank_N.argsort(stable=True)

    def of(self, own: Tensor) -> Tensor:
        """Values of all tokens, from those of this rank's."""
        return own if self._group is None else _gathered(own.detach(), self._group)[self._order_N]

    def own(self, whole: Tensor) -> Tensor:
        """Values of this rank's tokens, from those of all."""
        if self._group is None:
            return whole
        by_rank = torch.empty_like(whole)
        by_rank[self._order_N] = whole
        return by_rank.chunk(self._group.size())[self._group.rank()]


def _gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    """Rows of all ranks, in order of rank."""
    whole = own.new_empty(len(own) * group.size(), *own.shape[1:])
    all_gather(whole, own.contiguous(), group=group)
    return whole
