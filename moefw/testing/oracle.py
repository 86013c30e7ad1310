"""The dense oracle: an MoE layer in fp64 on one rank, every expert on every token, no dispatch.

It follows the formulas and shares no code with plugins. The choice of experts is :func:`moefw.testing.choices.route`.
Shapes: legend in :mod:`moefw.core.stages`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moefw.testing.choices import Rule, route

__all__ = ["Rule", "Truth", "dense_moe", "expert_output", "merged"]


@dataclass(kw_only=True)
class Truth:
    """Outputs, chosen experts, counts and the gradient of every input and parameter by canonical name.

    ``tokens_per_expert`` counts choices before any is dropped; ``expert_ids_TK`` holds -1 for dropped choices.
    """

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
    beta_E: Tensor | None = None,
    load_E: Tensor | None = None,
    jitter_TD: Tensor | None = None,
    mask_T: Tensor | None = None,
    micro_batches: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    dropped_TK: Tensor | None = None,
    shared: bool = False,
    clamp: tuple[float, float] | None = None,
    adapter_scale: float = 0.0,
) -> Truth:
    """Truth for the loss ``sum(out * probe) + auxiliary losses``.

    ``parameters`` holds ``router.weight`` (E, D) and perhaps ``router.bias`` (E),
    ``experts.{e}.{gate,up,down}_proj.weight``, perhaps with ``bias`` (F or D), and, if ``shared``,
    ``shared_expert.{gate,up,down}_proj.weight``; and factors of adapters, see :func:`merged`, whose scale is
    ``adapter_scale``. ``clamp``: see :func:`expert_output`.
    ``micro_batches``, ``sequences`` and ``ranks`` are the lengths of the consecutive pieces of ``x_TD`` that are routed
    together; ``bias_E``, ``beta_E`` and ``load_E`` are router state: see :func:`moefw.testing.choices.route`. Auxiliary
    losses are means over all valid tokens. ``jitter_TD`` multiplies the router's input. ``dropped_TK``, bool: choices
    that are dropped after the router.
    """
    leaves = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    weights = merged(leaves, adapter_scale)
    x = x_TD.detach().double().requires_grad_()
    valid = torch.ones(len(x), dtype=torch.bool) if mask_T is None else mask_T
    logits = (x if jitter_TD is None else x * jitter_TD.double()) @ weights["router.weight"].T
    logits = logits + weights.get("router.bias", 0.0)
    routed = route(
        logits,
        rule,
        bias_E=bias_E,
        beta_E=beta_E,
        load_E=load_E,
        valid=valid,
        micro_batches=micro_batches,
        sequences=sequences,
        ranks=ranks,
    )
    ids = routed.ids_TK if dropped_TK is None else routed.ids_TK.masked_fill(dropped_TK, -1)
    out = torch.zeros_like(x)
    for expert in range(logits.shape[1]):
        gate = (routed.weights_TK * (ids == expert)).sum(-1, keepdim=True)
        out = out + gate * expert_output(x, weights, f"experts.{expert}.", clamp)
    if shared:
        out = out + expert_output(x, weights, "shared_expert.", clamp)
    loss = (out * probe_TD.double()).sum() + routed.loss
    loss.backward()
    grads = {name: _grad(leaf) for name, leaf in leaves.items()} | {"x": _grad(x)}
    counts = torch.stack([(routed.chosen_TK == expert).sum() for expert in range(logits.shape[1])]).double()
    return Truth(out_TD=out.detach(), expert_ids_TK=ids, tokens_per_expert=counts, grads=grads)


def merged(parameters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Weights with their adapters merged, ``W + scale B A`` (LoRA, arXiv 2106.09685); the others as they are.

    B of ``X.weight`` is ``X.lora_B``, A is ``X.lora_A``. Gate and up of a routed expert share ``gate_up_proj.lora_A``.
    """
    weights = {name: value for name, value in parameters.items() if ".lora_" not in name}
    for name in [*weights]:
        stem = name.removesuffix(".weight")
        low_rank_b = parameters.get(f"{stem}.lora_B")
        if low_rank_b is not None:
            shared = re.sub(r"(experts\.\d+)\.(gate|up)_proj", r"\1.gate_up_proj", stem)
            weights[name] = weights[name] + scale * low_rank_b @ parameters[f"{shared}.lora_A"]
    return weights


def expert_output(
    x: Tensor, weights: Mapping[str, Tensor], prefix: str, clamp: tuple[float, float] | None = None
) -> Tensor:
    """``W2 (silu(g) * u) + b2`` with ``g = W1 x + b1``, ``u = W3 x + b3``. Biases that are missing are zero.

    With ``clamp = (limit, alpha)``: the activation of gpt-oss, ``(u + 1) * g * sigmoid(alpha * g)``, where g is at most
    ``limit`` and u between its negative and itself (arXiv 2508.10925).
    """

    def affine(x: Tensor, part: str) -> Tensor:
        return x @ weights[f"{prefix}{part}_proj.weight"].T + weights.get(f"{prefix}{part}_proj.bias", 0.0)

    gate = affine(x, "gate")
    up = affine(x, "up")
    if clamp is None:
        return affine(torch.nn.functional.silu(gate) * up, "down")
    limit, alpha = clamp
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return affine((up + 1.0) * gate / (1.0 + torch.exp(-alpha * gate)), "down")


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
