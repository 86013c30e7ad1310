"""Reference routing in fp64, by token and by expert, from the formulas alone. It shares no code with plugins.

Shapes: legend in :mod:`moefw.core.stages`. Formulas: Megatron Core as noted in each function; DeepSeek-V3 (arXiv
2412.19437), Switch (2101.03961), ST-MoE (2202.08906).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Definition of a routing, with the names of the routers' options. A coefficient of 0 disables its loss.

    ``kind`` is the router: topk, sinkhorn or forced. ``groups`` is (count, keep), ``group_best`` how many score a group
    (None: K // keep), ``capacity`` (factor, drop).
    """

    kind: str = "topk"
    score: str = "sigmoid"
    pre_softmax: bool = False
    top_k: int
    renormalise: bool = True
    scale: float = 1.0
    groups: tuple[int, int] | None = None
    group_best: int | None = None
    capacity: tuple[float, str] | None = None
    aux_coeff: float = 0.0
    sequence_aux_coeff: float = 0.0
    global_aux_coeff: float = 0.0
    z_coeff: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Expert ids and weights of tokens. ``chosen_TK`` is before, ``ids_TK`` after a capacity drops; -1 is no choice.

    ``loss`` is the sum of the auxiliary losses, each a mean over all valid tokens.
    """

    chosen_TK: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    loss: Tensor


def route(
    logits: Tensor,
    rule: Rule,
    *,
    bias_E: Tensor | None = None,
    beta_E: Tensor | None = None,
    load_E: Tensor | None = None,
    valid: Tensor | None = None,
    micro_batches: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> Routed:
    """Route tokens by ``logits`` (T, E) fp64. Differentiable.

    ``bias_E`` is the expert bias, ``beta_E`` the quantiles, ``load_E`` the load of the last global batch (1 = fair).
    ``micro_batches`` and ``sequences`` are lengths of consecutive pieces of T; None: one piece. ``ranks``: lengths of
    the pieces that have a capacity each; None: ``micro_batches``.
    """
    valid = torch.ones(len(logits), dtype=torch.bool) if valid is None else valid
    capped = list(_pieces(logits, micro_batches if ranks is None else ranks))
    scores = scores_of(logits, rule)
    chosen = torch.full((len(logits), rule.top_k), -1, dtype=torch.int64)
    for piece in _pieces(logits, micro_batches):
        chosen[piece] = _choices(logits[piece].detach(), scores[piece].detach(), valid[piece], rule, bias_E, beta_E)
    weights = _weights(logits, scores, chosen, rule) * rule.scale
    chosen = chosen.masked_fill(~valid.unsqueeze(-1), -1)
    ids = chosen.clone()
    if rule.capacity is not None:
        for piece in capped:
            ids[piece] = within_capacity(chosen[piece], weights[piece], logits.shape[1], rule)
    loss = rule.z_coeff * _mean(logits.logsumexp(-1).square(), valid)
    shares = scores / scores.sum(-1, keepdim=True)
    # Switch's loss counts the experts with the best scores, not those that groups, biases or capacities let through.
    best = scores.topk(rule.top_k).indices
    for coeff, lengths in ((rule.aux_coeff, micro_batches), (rule.sequence_aux_coeff, sequences)):
        if not coeff:
            continue
        for piece in _pieces(logits, lengths):
            weight = valid[piece].sum() / valid.sum().clamp_min(1)
            loss = loss + coeff * weight * switch(shares[piece][valid[piece]], best[piece][valid[piece]])
    if rule.global_aux_coeff:
        assert load_E is not None
        loss = loss + rule.global_aux_coeff * _mean((shares * load_E.double()).sum(-1), valid)
    return Routed(chosen_TK=chosen, ids_TK=ids, weights_TK=weights * (ids >= 0), loss=loss)


def scores_of(logits: Tensor, rule: Rule) -> Tensor:
    """Score of every expert. A softmax is over all experts."""
    if rule.kind == "sinkhorn":
        return 1 / (1 + (-logits).exp()) if rule.top_k == 1 else logits.softmax(-1)
    if rule.score == "sigmoid":
        return 1 / (1 + (-logits).exp())
    if rule.score == "sqrtsoftplus":
        return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()
    return logits.softmax(-1)


def switch(shares: Tensor, best: Tensor) -> Tensor:
    """``E / (K N^2) sum_e mass_e n_e`` of N tokens: Switch's loss, 1 if experts have equal loads."""
    tokens, num_experts = shares.shape
    loss = shares.new_zeros(())
    for expert in range(num_experts if tokens else 0):
        loss = loss + shares[:, expert].sum() * (best == expert).sum()
    return loss * num_experts / (best.shape[1] * max(1, tokens) ** 2)


def within_capacity(chosen: Tensor, weights: Tensor, num_experts: int, rule: Rule) -> Tensor:
    """One rank's choices, at most ``ceil(T K / E * factor)`` per expert; dropped ones are -1."""
    assert rule.capacity is not None
    factor, drop = rule.capacity
    # Decimal, because in binary 1.1 * 100 is above 110, and its ceiling a row too many.
    capacity = math.ceil(Decimal(str(factor)) * chosen.numel() / num_experts)
    remaining = chosen.clone()
    for expert in range(num_experts):
        choices = [(token, choice) for token, choice in (chosen == expert).nonzero().tolist()]
        if drop == "probs":
            choices.sort(key=lambda choice: -weights[choice].item())
        for choice in choices[capacity:]:
            remaining[choice] = -1
    return remaining


def _choices(
    logits: Tensor, scores: Tensor, valid: Tensor, rule: Rule, bias_E: Tensor | None, beta_E: Tensor | None
) -> Tensor:
    """K experts of each token, int64 (T, K), before a capacity drops some."""
    tokens, num_experts = logits.shape
    if rule.kind == "forced":
        return torch.arange(tokens * rule.top_k).view(tokens, rule.top_k) % num_experts
    if rule.kind == "sinkhorn":
        ids = torch.zeros(tokens, rule.top_k, dtype=torch.int64)
        ids[valid] = sinkhorn(logits[valid]).topk(rule.top_k).indices
        return ids
    by_logits = beta_E is not None or (rule.score == "softmax" and not rule.pre_softmax)
    ranking = logits if by_logits else scores
    if bias_E is not None:
        ranking = ranking + bias_E.double()
    if beta_E is not None:
        ranking = ranking - beta_E.double()
    if rule.groups is not None and tokens:
        ranking = torch.stack([_best_groups(row, rule) for row in ranking])
    return ranking.topk(rule.top_k).indices


def _best_groups(row: Tensor, rule: Rule) -> Tensor:
    """One token's ranking, -inf outside its best groups. A group's value is the sum of its ``best`` best."""
    assert rule.groups is not None
    count, keep = rule.groups
    best = rule.group_best or rule.top_k // keep
    groups = row.chunk(count)
    values = [sum(sorted(group.tolist(), reverse=True)[:best]) for group in groups]
    best_groups = sorted(range(count), key=lambda group: -values[group])[:keep]
    excluded = torch.full_like(row, -math.inf).chunk(count)
    return torch.cat([groups[g] if g in best_groups else excluded[g] for g in range(count)])


def sinkhorn(logits: Tensor) -> Tensor:
    """Transport plan of valid tokens (N, E): Megatron Core's scaling of exp(logits).

    ``d0`` and ``d1`` are its names for the factors of tokens and of experts; 1e-4 and 1e-8 are its constants.
    """
    cost = logits.exp()
    tokens, num_experts = cost.shape
    d1 = torch.ones(num_experts, dtype=torch.float64)
    change = math.inf
    for _ in range(100):
        if change < 1e-4 or not tokens:
            break
        d0 = 1 / (tokens * ((cost * d1).sum(1) + 1e-8))
        new = 1 / (num_experts * ((cost * d0.unsqueeze(1)).sum(0) + 1e-8))
        change = (new - d1).abs().mean().item()
        d1 = new
    if not tokens:
        return cost
    return cost * d1 * d0.unsqueeze(1)


def _weights(logits: Tensor, scores: Tensor, chosen: Tensor, rule: Rule) -> Tensor:
    """Routing weights of the choices (T, K), before they are scaled."""
    if rule.kind == "forced" or (rule.kind == "topk" and rule.score == "softmax" and not rule.pre_softmax):
        return logits.gather(1, chosen).softmax(-1)
    weights = scores.gather(1, chosen)
    if rule.kind == "topk" and rule.score != "softmax" and rule.renormalise and rule.top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return values[valid].sum() / valid.sum().clamp_min(1)


def _pieces(tokens: Tensor, lengths: Sequence[int] | None) -> Iterator[slice]:
    """Yield the slices of consecutive pieces of these lengths; None: one piece of all tokens."""
    if lengths is None:
        lengths = [len(tokens)]
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length
