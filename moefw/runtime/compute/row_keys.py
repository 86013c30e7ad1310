"""Where the random draws for a row of an expert start: the key of its token, which follows the row to the expert.

A token's key is a hash of (seed of the sequence, position), so every layout, dispatcher and recompute draws the same
numbers for a row. No two sequences of a run have one seed, so each step draws anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.core.stages import DispatchHandle, ExpertBatch

if TYPE_CHECKING:
    from moefw.core.contracts import Dispatcher

PER_KEY: Final = 4
"""A key fills so many columns of bf16."""
APART: Final = 0x1E3779B97F4A7C15
"""An odd number: its multiples, by an expert's number, keep the keys of a token's rows apart until they are hashed."""


@torch.no_grad()
def with_keys(
    arrived: ExpertBatch,
    handle: DispatchHandle,
    keys_T: Tensor,
    weights_TK: Tensor,
    dispatcher: Dispatcher,
    *,
    first_expert: int,
) -> ExpertBatch:
    """Return the rows that arrived along ``handle`` with their keys, 0 for padding. Collective, as a redispatch is.

    The bits of ``keys_T`` travel as rows of ``dispatcher.key_columns`` bf16; ``first_expert`` is this rank's.
    """
    bits_TD = F.pad(keys_T.unsqueeze(1), (0, dispatcher.key_columns // PER_KEY - 1)).view(torch.bfloat16)
    batch, _ = dispatcher.redispatch(bits_TD, weights_TK.detach(), handle)
    keys_R = batch.rows_RD[:, :PER_KEY].contiguous().view(torch.int64).squeeze(1)
    places_R = torch.arange(len(keys_R), device=keys_R.device)
    expert_R = first_expert + torch.bucketize(places_R, arrived.offsets_e, right=True)
    return replace(arrived, keys_R=torch.where(keys_R == 0, 0, keys_R ^ (expert_R + 1) * APART))
