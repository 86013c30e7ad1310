"""Keys of tokens and of experts' rows, from which random draws start. A token's key follows its rows to the experts.

A token's key is a hash of (seed of the sequence, position), so every layout, dispatcher and recompute draws the same
numbers for a row. All sequences of a run have different seeds, so each step draws new numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.core.stages import Batch, ExpertBatch
from moefw_kernels.random import token_keys

if TYPE_CHECKING:
    from moefw.core.contracts import Dispatcher

SALT: Final = -1
"""Salt of these keys. Routers use the number of their layer as salt."""
PER_KEY: Final = 4
"""Number of bf16 columns that a key fills."""
APART: Final = 0x1E3779B97F4A7C15
"""An odd number. Its multiples by the expert's number make the keys of a token's rows differ before they are hashed."""


def keyed(batch: Batch) -> Batch:
    """Batch with a key for each flattened token, or the batch itself if it has no seeds."""
    draws = batch.draws
    return batch if draws is None else replace(batch, keys_T=token_keys(*draws, salt=SALT))


@torch.no_grad()
def with_keys(
    arrived: ExpertBatch,
    handle: Any,
    keys_T: Tensor,
    weights_TK: Tensor,
    dispatcher: Dispatcher[Any, Any],
    *,
    first_expert: int,
) -> ExpertBatch:
    """``arrived``, the batch of ``handle``, with the keys of its rows, 0 for padding. Collective.

    A redispatch moves the bits of ``keys_T`` as rows of ``dispatcher.key_columns`` bf16 columns. ``first_expert`` is
    the number of this rank's first expert.
    """
    num_zeros = dispatcher.key_columns // PER_KEY - 1
    bits_TD = F.pad(keys_T.unsqueeze(1), (0, num_zeros)).view(torch.bfloat16)
    batch, _ = dispatcher.redispatch(bits_TD, weights_TK.detach(), handle)
    token_keys_R = batch.rows_RD[:, :PER_KEY].contiguous().view(torch.int64).squeeze(1)
    rows_R = torch.arange(len(token_keys_R), device=token_keys_R.device)
    expert_R = first_expert + torch.bucketize(rows_R, arrived.offsets_e, right=True)
    # A token's rows go to several experts: the expert's number makes their keys differ. Padding stays 0.
    keys_R = torch.where(token_keys_R == 0, 0, token_keys_R ^ (expert_R + 1) * APART)
    return replace(arrived, keys_R=keys_R)
