"""Which choices a static budget of received rows leaves out: by brute force, for the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def over_budget(
    expert_ids: Sequence[Tensor], *, num_experts: int, ep: int, rank_capacity: float, row_alignment: int = 1
) -> list[Tensor]:
    """Return for each rank of one expert-parallel group which of its choices find no room, bool ``(T, K)``.

    Rows lie in order (expert, source rank, token), each expert's padded to the alignment; a rank has room for
    ``rank_capacity * K`` rows for each token of the rank that has most, rounded up to the alignment; with experts in
    parts, every part leaves out the same.
    """
    out = [torch.zeros_like(ids_TK, dtype=torch.bool) for ids_TK in expert_ids]
    parts = len(expert_ids) // ep
    rows = math.ceil(rank_capacity * parts * max(ids_TK.numel() for ids_TK in expert_ids))
    budget = -(-rows // row_alignment) * row_alignment
    each = num_experts // ep
    for share in range(ep):
        place = 0
        for expert in range(share * each, (share + 1) * each):
            for rank, ids_TK in enumerate(expert_ids):
                for token, choice in (ids_TK == expert).nonzero().tolist():
                    out[rank][token, choice] = place >= budget
                    place += 1
            place = -(-place // row_alignment) * row_alignment
    return out
