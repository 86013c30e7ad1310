"""Static rows: each rank sends every rank equally many rows, whatever the routing. The host reads no count of rows.

Shapes: legend in :mod:`moefw.core.stages`; ``P`` ranks, ``C`` rows of a pair of ranks, ``N`` rows that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Metadata of a movement within a budget. Collective.

    A pair of ranks has room for an equal part of the budget. Rows beyond it stay where they are, and rows beyond the
    budget of a rank are left out where they arrive. Both count as overflow of the rank that they are for. The host
    waits once if it has to: for the most tokens of any rank, unless they are given, or for counts that a part needs.
    """
    num_tokens, k = ids_TK.shape
    budget = limit.budget
    if limit.max_tokens is not None:
        check_tokens(num_tokens, limit.max_tokens)
    # A line goes to each rank: the rows for each of its experts, and this rank's tokens. (E) -> (P, e) -> (P, e + 1)
    choices = sort_choices(ids_TK, experts.num_experts)
    ones = [1] * experts.size
    lines_to_P = F.pad(by_rank(choices.counts, experts), (0, 1), value=num_tokens)
    lines_from_P = exchange_now(lines_to_P, ones, ones, experts.metadata_group)
    rows_from_Pe = lines_from_P[:, :-1]
    lines_from: Sequence[Sequence[int]] = ()
    if counts_on_host or limit.max_tokens is None:
        (lines_from,) = on_host(lines_from_P)
    most_tokens = limit.max_tokens or max(line[-1] for line in lines_from)
    most_choices = most_tokens * k
    # A pair of ranks never needs room for more than all choices of the sender.
    room = min(-(-budget.rows(most_choices, 1) // experts.ep), most_choices)
    part = experts.rank % experts.etp
    splits = [room if rank % experts.etp == part else 0 for rank in range(experts.size)]
    # Rows arrive in order (part, source rank), ``room`` of each source: N = P * room, of which R stay.
    expert_N, source_N = _arriving(experts, rows_from_Pe, room)
    arrival = arrange(
        expert_N.unsqueeze(1),
        experts.local_experts,
        alignment=row_alignment,
        budget=budget.rows(most_choices * experts.etp, row_alignment),
        source_N=source_N if experts.etp > 1 else None,
        counts=_arriving_counts(lines_from, room) if counts_on_host else None,
        counts_on_host=counts_on_host,
    )
    return Metadata(
        slots=in_blocks(choices, ids_TK, num_blocks=experts.ep, room=room),
        sent=splits,
        received=splits,
        parts=Parts.of(experts, [room] * experts.size) if experts.etp > 1 else None,
        groups=arrival,
        stats={budget.stat: (rows_from_Pe.sum() - arrival.counts_e.sum()).float()},
    )


def _arriving_counts(lines_from: Sequence[Sequence[int]], room: int) -> list[int]:
    """How many rows arrive for each local expert, given each rank's line: its rows for each, and its tokens."""
    rows_from_Pe = [line[:-1] for line in lines_from]
    ends_Pe = np.minimum(np.cumsum(rows_from_Pe, 1), room)
    counts: list[int] = np.diff(ends_Pe, axis=1, prepend=0).sum(0).tolist()
    return counts


def _arriving(experts: ExpertGroup, rows_from_Pe: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Local expert of each row that arrives, and its source rank, both ``(P * room)``.

    Behind the last row of a source the expert is ``e``, which is none. ``rows_from_Pe``: the rows that each rank has
    for each local expert. Rows arrive by part, then by rank.
    """
    # In order of ranks (ep, etp) -> in order of arrival (etp, ep)
    ends_Pe = rows_from_Pe.cumsum(1).view(experts.ep, experts.etp, -1).transpose(0, 1).reshape(experts.size, -1)
    source_P = torch.arange(experts.size, device=ends_Pe.device).view(experts.ep, experts.etp).t().flatten()
    # A source's rows are in order of experts: the expert of a row is the number of experts that end before it.
    places_PC = torch.arange(room, device=ends_Pe.device).repeat(experts.size, 1)
    expert_N = torch.searchsorted(ends_Pe, places_PC, right=True).flatten()
    return expert_N, source_P.unsqueeze(1).expand(-1, room).flatten()
