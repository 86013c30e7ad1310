"""Static rows: each rank sends every other rank as many rows, whatever the routing. The host reads no count of rows.

Shapes: legend in :mod:`moefw.core.stages`; ``P`` ranks, ``C`` rows of a pair of ranks, ``N`` rows that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from moefw.core.context import ExpertGroup
from moefw.plugins.dispatchers.alltoall.metadata import Metadata, Parts
from moefw.plugins.dispatchers.budget import Budget, check_tokens
from moefw.runtime.communication.exchange import by_rank, exchange_now
from moefw_kernels.devices import on_host
from moefw_kernels.permute import arrange, in_blocks, sort_choices


@frozen
class Limit:
    """A budget, and the most tokens of any rank; None: the ranks agree on it, for which the host waits once."""

    budget: Budget
    max_tokens: int | None


def within(limit: Limit, experts: ExpertGroup, ids_TK: Tensor, *, row_alignment: int, counts_on_host: bool) -> Metadata:
    """Return the metadata of a movement within a budget. Collective.

    A pair of ranks has room for an equal part of the budget. Rows beyond it stay where they are, and rows beyond the
    budget of a rank are left out where they arrive. Both count as overflow of the rank that they are for. The host
    waits once if it has to: for the most tokens of any rank, unless they are given, or for counts that a part needs.
    """
    (num_tokens, k), budget = ids_TK.shape, limit.budget
    if limit.max_tokens is not None:
        check_tokens(num_tokens, limit.max_tokens)
    about: dict[str, Any] = {"alignment": row_alignment, "counts_on_host": counts_on_host}
    ours, ones = sort_choices(ids_TK, experts.num_experts), [1] * experts.size
    told_P = F.pad(by_rank(ours.counts, experts), (0, 1), value=num_tokens)
    heard_P = exchange_now(told_P, ones, ones, experts.group)
    read = on_host(heard_P)[0] if counts_on_host or limit.max_tokens is None else ()
    choices = (limit.max_tokens or max(tokens for *_, tokens in read)) * k
    room = min(-(-budget.rows(choices, 1) // experts.ep), choices)
    part, asked_Pe = experts.rank % experts.etp, heard_P[:, :-1]
    splits = [room if rank % experts.etp == part else 0 for rank in range(experts.size)]
    expert_N, source_N = _arriving(experts, asked_Pe, room)
    arrival = arrange(
        expert_N.unsqueeze(1),
        experts.local_experts,
        budget=budget.rows(choices * experts.etp, row_alignment),
        source_N=source_N if experts.etp > 1 else None,
        counts=_kept(read, room) if counts_on_host else None,
        **about,
    )
    return Metadata(
        in_blocks(ours, ids_TK, num_blocks=experts.ep, room=room),
        splits,
        splits,
        Parts.of(experts, [room] * experts.size) if experts.etp > 1 else None,
        arrival,
        {budget.stat: (asked_Pe.sum() - arrival.counts_e.sum()).float()},
    )


def _kept(read: Sequence[Sequence[int]], room: int) -> list[int]:
    """Return the rows that arrive for each local expert, given the rows that each rank has for it, and its tokens."""
    ends_Pe = np.minimum(np.cumsum([asked for *asked, _ in read], 1), room)
    kept: list[int] = np.diff(ends_Pe, axis=1, prepend=0).sum(0).tolist()
    return kept


def _arriving(experts: ExpertGroup, asked_Pe: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Return the local expert of each row that arrives, and its source rank; behind a rank's last row no expert.

    ``asked_Pe``: the rows that each rank has for each local expert. Rows arrive by part, then by rank.
    """
    ends_Pe = asked_Pe.cumsum(1).view(experts.ep, experts.etp, -1).transpose(0, 1).reshape(experts.size, -1)
    places_PC = torch.arange(room, device=asked_Pe.device).repeat(experts.size, 1)
    source_P = torch.arange(experts.size, device=asked_Pe.device).view(experts.ep, experts.etp).t().flatten()
    expert_N = torch.searchsorted(ends_Pe, places_PC, right=True).flatten()
    return expert_N, source_P.unsqueeze(1).expand(-1, room).flatten()
