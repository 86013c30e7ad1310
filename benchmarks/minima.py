"""Minimal numbers of rows to send: counted for given expert ids, and expected for two random routings.

A *unit* is a rank or a node. Units hold equal numbers of consecutive experts. The
expected number of units that K of E experts touch is ``R(P) = P * (1 - C(E - E/P, K) / C(E, K))``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb

import torch
from attrs import frozen
from torch import Tensor


def distinct(ids_by_rank: Sequence[Tensor], *, num_experts: int, num_units: int) -> int:
    """Number of pairs (token, unit with an expert of the token), without the token's own unit.

    ``ids_by_rank`` holds each rank's ``expert_ids_TK``, -1 for a dropped choice. No dispatch that sends every token to
    its experts sends fewer rows between units. Neither does a combine, which returns a sum of rows from each unit.
    """
    return sum(
        unit != _home(ids_by_rank, rank, num_units)
        for rank, token in _tokens(ids_by_rank)
        for unit in _units(token, num_experts // num_units)
    )


def inside(ids_by_rank: Sequence[Tensor], *, num_experts: int, ranks_per_node: int, by_rail: bool = True) -> int:
    """Fewest rows sent between ranks inside nodes, if each token is sent to a node only once.

    In each node, a token's row starts on one rank: in the token's own node on its own rank, else on the rank that
    receives it. The row is sent to every other rank of the node with an expert of the token. So the first rank does not
    count, even if it has an expert. ``by_rail``: the receiving rank has the same position in its node as the token's
    rank, as with one network per position. Not ``by_rail``: any rank may receive it, so one with an expert does, which
    gives a bound for all dispatchers. (A token sent to a node more than once may need fewer rows inside nodes, but it
    needs more between nodes.)
    """
    num_ranks = len(ids_by_rank)
    rows = 0
    for rank, token in _tokens(ids_by_rank):
        node, rail = divmod(rank, ranks_per_node)
        owners = _units(token, num_experts // num_ranks)
        rows += len(owners)
        for visited in {owner // ranks_per_node for owner in owners}:
            may_start_on_an_owner = visited != node and not by_rail
            if may_start_on_an_owner or visited * ranks_per_node + rail in owners:
                rows -= 1  # the rank where the row starts, to which nothing is sent inside the node
    return rows


def _tokens(ids_by_rank: Sequence[Tensor]) -> Iterator[tuple[int, list[int]]]:
    for rank, ids_TK in enumerate(ids_by_rank):
        for token in ids_TK.tolist():
            yield rank, [expert for expert in token if expert >= 0]


def _units(token: Sequence[int], experts_per_unit: int) -> set[int]:
    return {expert // experts_per_unit for expert in token}


def _home(ids_by_rank: Sequence[Tensor], rank: int, num_units: int) -> int:
    return rank * num_units // len(ids_by_rank)


@frozen(kw_only=True)
class Scheme:
    """Random routing: draw ``limit`` of ``groups`` groups of consecutive experts, then K experts inside them.

    With one group, routing is uniform.
    """

    num_experts: int
    top_k: int
    groups: int = 1
    limit: int = 1

    def draw(self, num_tokens: int, *, generator: torch.Generator) -> Tensor:
        """``expert_ids_TK``, int64."""
        order_TG = torch.rand(num_tokens, self.groups, generator=generator)
        chosen_TG = torch.zeros_like(order_TG).scatter_(1, order_TG.topk(self.limit).indices, 1.0)
        open_TE = chosen_TG.repeat_interleave(self.num_experts // self.groups, 1)
        return (torch.rand(open_TE.shape, generator=generator) + open_TE).topk(self.top_k).indices

    def touched(self, num_units: int) -> float:
        """Expected number of units, of ``num_units``, with an expert of a token; its own unit counts.

        By the number of drawn groups among those that a unit spans, which is hypergeometric: the probability that the
        token's K experts, drawn inside all drawn groups, avoid the unit.
        """
        unit_experts = self.num_experts // num_units
        group_experts = self.num_experts // self.groups
        spanned = max(1, unit_experts // group_experts)
        pool = self.limit * group_experts
        untouched = 0.0
        for drawn in range(min(spanned, self.limit) + 1):
            ways = comb(spanned, drawn) * comb(self.groups - spanned, self.limit - drawn)
            avoiding = comb(pool - drawn * unit_experts // spanned, self.top_k) / comb(pool, self.top_k)
            untouched += ways / comb(self.groups, self.limit) * avoiding
        return num_units * (1 - untouched)

    def between(self, num_units: int) -> float:
        """Expected minimum of rows per token between units: :func:`distinct` per token."""
        return self.touched(num_units) * (num_units - 1) / num_units

    def within(self, num_ranks: int, ranks_per_node: int) -> float:
        """Expected minimum of rows per token inside nodes by rail: :func:`inside` per token."""
        return self.touched(num_ranks) * (ranks_per_node - 1) / ranks_per_node
