"""The dense oracle: an MoE layer in fp64 on one rank, every expert on every token, no dispatch.

Written apart from the plugins, from the formulas alone. Shapes: legend in :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the routing computes; the same words as the router's options."""

    score: str = "sigmoid"
    top_k: int
    renormalise: bool = True
    scale: float = 1.0
    aux_coeff: float = 0.0
    z_coeff: float = 0.0


@dataclass(kw_only=True)
class Truth:
    """Outputs, chosen experts, counts and the gradient of every input and parameter by canonical name."""

    out_TD: Tensor
    expert_ids_TK: Tensor
    tokens_per_expert: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


def dense_moe(
    parameters: Mapping[str, Tensor],
    x_TD: Tensor,
    probe_TD: Tensor,
    rule: Rule,
    *,
    bias_E: Tensor | None = None,
    mask_T: Tensor | None = None,
    micro_batches: Sequence[int] | None = None,
    shared: bool = False,
) -> Truth:
    """Return the truth for the loss ``sum(out * probe) + auxiliary losses``.

    ``parameters`` holds ``router.weight`` (E, D), ``experts.{e}.{gate,up,down}_proj.weight`` and, if ``shared``,
    ``shared_expert.{gate,up,down}_proj.weight``. ``micro_batches`` are the lengths of the consecutive pieces of
    ``x_TD`` over which the balance loss looks (one piece if None); auxiliary losses are scaled by 1 / valid tokens.
    """
    weights = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    x = x_TD.detach().double().requires_grad_()
    valid = torch.ones(len(x), dtype=torch.bool) if mask_T is None else mask_T
    logits = x @ weights["router.weight"].T
    scores = logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(-1)
    ids, chosen = _choose(logits, scores, rule, bias_E)
    gates = torch.zeros_like(scores).scatter(1, ids, chosen) * valid.unsqueeze(-1)
    out = torch.zeros_like(x)
    for expert in range(scores.shape[1]):
        out = out + gates[:, expert : expert + 1] * _expert(x, weights, f"experts.{expert}.")
    if shared:
        out = out + _expert(x, weights, "shared_expert.")
    loss = (out * probe_TD.double()).sum() + _auxiliary(logits, scores, valid, rule, micro_batches)
    loss.backward()
    grads = {name: _grad(weight) for name, weight in weights.items()} | {"x": _grad(x)}
    counts = torch.zeros(scores.shape[1], dtype=torch.float64)
    counts.index_add_(0, ids[valid].flatten(), torch.ones(ids[valid].numel(), dtype=torch.float64))
    ids = ids.masked_fill(~valid.unsqueeze(-1), -1)
    return Truth(out_TD=out.detach(), expert_ids_TK=ids, tokens_per_expert=counts, grads=grads)


def _choose(logits: Tensor, scores: Tensor, rule: Rule, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    if rule.score == "softmax":
        top = logits.topk(rule.top_k)
        return top.indices, top.values.softmax(-1) * rule.scale
    ids = (scores if bias_E is None else scores + bias_E.double()).topk(rule.top_k).indices
    chosen = scores.gather(1, ids)
    if rule.renormalise:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return ids, chosen * rule.scale


def _expert(x: Tensor, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _auxiliary(
    logits: Tensor, scores: Tensor, valid: Tensor, rule: Rule, micro_batches: Sequence[int] | None
) -> Tensor:
    """Token-weighted mean over micro-batches of ``coeff * E / (K N^2) sum_e mass_e n_e``, plus the z-loss's mean."""
    total = valid.sum().clamp_min(1).double()
    loss = logits.new_zeros(())
    shares = scores / scores.sum(-1, keepdim=True)
    num_experts = scores.shape[1]
    start = 0
    for length in micro_batches or [len(logits)]:
        piece = slice(start, start + length)
        start += length
        kept = valid[piece]
        tokens = kept.sum().double()
        if tokens == 0:
            continue
        best = torch.zeros_like(scores[piece]).scatter(1, scores[piece].topk(rule.top_k).indices, 1.0)
        counts = best[kept].sum(0)
        mass = shares[piece][kept].sum(0)
        mean = num_experts / (rule.top_k * tokens**2) * (mass * counts).sum()
        loss = loss + rule.aux_coeff * mean * tokens / total
    return loss + rule.z_coeff * logits.logsumexp(-1).square()[valid].sum() / total


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
