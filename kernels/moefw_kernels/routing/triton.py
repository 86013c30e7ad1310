"""Triton kernels of the router's choice. A program routes some tokens, a few at a time.

Experts lie in groups, each padded to a power of two. What an expert is chosen by is a key, unique among a token's
experts: a float's bits as an integer of the same order, then the lower number first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import is_compiled
from moefw_kernels.routing.choice import Choice
from moefw_kernels.routing.in_kernels import (
    NONE,
    contiguous,
    keys_of,
    ordered,
    score_of,
    slope_of,
    softmax,
    together,
    value_of,
)

TOKENS: Final = 32
"""Tokens of a program: a row of counts."""


@triton.jit
def _only_best_groups(
    keys, GROUPS: tl.constexpr, KEEP: tl.constexpr, BEST: tl.constexpr,
    N: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Return the keys with that of -inf outside the ``KEEP`` groups whose ``BEST`` best have the largest sum."""
    keys_NGS = tl.reshape(keys, (N, G, S))
    left = keys_NGS
    worth = tl.zeros((N, G), tl.float32)
    for _ in range(BEST):
        best = tl.max(left, 2)
        worth += value_of(best)
        left = tl.where(left == best[:, :, None], NONE, left)
    group = tl.arange(0, G)[None, :]
    of_group = tl.where(group < GROUPS, keys_of(worth, group, G), NONE)
    kept = tl.zeros((N, G), tl.int1)
    for _ in range(KEEP):
        best = tl.max(of_group, 1)[:, None]
        kept = kept | (of_group == best)
        of_group = tl.where(of_group == best, NONE, of_group)
    lost = (ordered(tl.full((N, G, S), float("-inf"), tl.float32)) << 32) | (keys_NGS & 0xFFFFFFFF)
    keys_NGS = tl.where(kept[:, :, None] | (keys_NGS == NONE), keys_NGS, lost)
    return tl.reshape(keys_NGS, (N, G * S))


@triton.jit
def _route_kernel(
    logits, bias, present, ids, weights, counts, chosen, tokens, num_experts, scale,
    SCORE: tl.constexpr, PRE: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, KEEP: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr,
    G: tl.constexpr, S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    TOKENS: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Choose the experts of ``TOKENS`` tokens, weigh them, and count them."""
    program = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, G * S)
    expert = place // S * SIZE + place % S
    there = (place % S < SIZE) & (place // S < GROUPS)
    k = tl.arange(0, KP)[None, :]
    count = tl.zeros((G * S,), tl.int32)
    for start in range(0, TOKENS, N):
        t = program * TOKENS + start + tl.arange(0, N)
        routed = t < tokens
        at = t[:, None] * num_experts + expert[None, :]
        inside = routed[:, None] & there[None, :]
        logit = tl.where(there[None, :], tl.load(logits + at, mask=inside, other=0.0), float("-inf"))
        by = logit
        if PRE or SCORE != "softmax":
            by = softmax(logit, COMPILED) if SCORE == "softmax" else score_of(logit, SCORE, COMPILED)
        value = by if PRE else logit
        if bias is not None:
            by += tl.load(bias + expert, mask=there, other=0.0)[None, :]
        keys = tl.where(there[None, :], keys_of(by, place[None, :], G * S), NONE)
        if GROUPS > 1:
            keys = _only_best_groups(keys, GROUPS, KEEP, BEST, N, G, S)
        id_NK = tl.zeros((N, KP), tl.int32)
        value_NK = tl.zeros((N, KP), tl.float32)
        for choice in range(K):
            best = tl.max(keys, 1)[:, None]
            hit = keys == best
            keys = tl.where(hit, NONE, keys)
            place_N1 = G * S - 1 - (best & 0xFFFFFFFF).to(tl.int32)
            id_NK = tl.where(k == choice, place_N1 // S * SIZE + place_N1 % S, id_NK)
            value_NK = tl.where(k == choice, tl.sum(tl.where(hit, value, 0.0), 1)[:, None], value_NK)
        if present is not None:
            routed = routed & (tl.load(present + t, mask=routed, other=0) != 0)
        count += tl.sum(((keys == NONE) & routed[:, None]).to(tl.int32), 0)
        if PRE:
            weight = value_NK
        elif SCORE == "softmax":
            weight = softmax(tl.where(k < K, value_NK, float("-inf")), COMPILED)
        else:
            weight = tl.where(k < K, score_of(value_NK, SCORE, COMPILED), 0.0)
            if RENORMALISE:
                weight = tl.div_rn(weight, tl.broadcast_to(tl.sum(weight, 1)[:, None] + 1e-20, weight.shape))
        to = t[:, None] * K + k
        stored = (t < tokens)[:, None] & (k < K)
        tl.store(ids + to, tl.where(routed[:, None], id_NK, -1).to(tl.int64), mask=stored)
        tl.store(weights + to, tl.where(routed[:, None], weight * scale, 0.0), mask=stored)
        if chosen is not None:
            tl.store(chosen + to, value_NK, mask=stored)
    tl.store(counts + program * num_experts + expert, count.to(tl.float32), mask=there)


@triton.jit
def _backward_kernel(
    ids, chosen, logits, grad_weights, grad_logits, tokens, num_experts, scale,
    SCORE: tl.constexpr, PRE: tl.constexpr, RENORMALISE: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of N tokens' logits. A choice that is absent has none."""
    t = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    k, expert = tl.arange(0, KP)[None, :], tl.arange(0, E)[None, :]
    of_choice = t[:, None] * K + k
    there = (t < tokens)[:, None] & (k < K)
    id_NK = tl.load(ids + of_choice, mask=there, other=-1).to(tl.int32)
    grad = tl.where(id_NK >= 0, tl.load(grad_weights + of_choice, mask=there, other=0.0) * scale, 0.0)
    if not PRE:
        x = tl.load(chosen + of_choice, mask=there, other=0.0)
        if SCORE == "softmax":
            share = softmax(tl.where(k < K, x, float("-inf")), COMPILED)
            grad = share * (grad - tl.sum(grad * share, 1)[:, None])
        else:
            score = tl.where(k < K, score_of(x, SCORE, COMPILED), 0.0)
            if RENORMALISE:
                total = tl.broadcast_to(tl.sum(score, 1)[:, None] + 1e-20, score.shape)
                grad = tl.div_rn(grad - tl.sum(grad * tl.div_rn(score, total), 1)[:, None], total)
            grad *= tl.where(k < K, slope_of(x, score, SCORE, COMPILED), 0.0)
    spread = tl.zeros((N, E), tl.float32)
    for choice in range(K):
        hit = expert == tl.sum(tl.where(k == choice, id_NK, 0), 1)[:, None]
        spread += tl.where(hit, tl.sum(tl.where(k == choice, grad, 0.0), 1)[:, None], 0.0)
    at = t[:, None] * num_experts + expert
    inside = (t < tokens)[:, None] & (expert < num_experts)
    if PRE:
        x = tl.where(expert < num_experts, tl.load(logits + at, mask=inside, other=0.0), float("-inf"))
        share = softmax(x, COMPILED)
        spread = share * (spread - tl.sum(share * spread, 1)[:, None])
    tl.store(grad_logits + at, spread, mask=inside)


def route(
    logits_TE: Tensor, choice: Choice, bias_E: Tensor | None, mask_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Implement ``moefw_kernels.routing.route`` for fp32; return also what weights were computed from, fp32 (T, K).

    The last is None where the weights are the scores of a softmax.
    """
    (tokens, experts), k, logits_TE = logits_TE.shape, choice.k, logits_TE.contiguous()
    count, keep, best = choice.groups or (1, 1, 1)
    group, groups = triton.next_power_of_2(experts // count), triton.next_power_of_2(count)
    programs = triton.cdiv(tokens, TOKENS)
    ids_TK = logits_TE.new_empty(tokens, k, dtype=torch.int64)
    weights_TK = logits_TE.new_empty(tokens, k)
    chosen_TK = None if choice.pre_softmax else logits_TE.new_empty(tokens, k)
    counts_PE = logits_TE.new_empty(programs, experts)
    if tokens:
        _route_kernel[(programs,)](
            logits_TE, contiguous(bias_E), contiguous(mask_T),
            ids_TK, weights_TK, counts_PE, chosen_TK, tokens, experts, choice.scale,
            *_kind(choice), count, keep, best, experts // count, groups, group, k, triton.next_power_of_2(k),
            TOKENS, min(TOKENS, together(groups * group)), is_compiled(),
        )  # fmt: skip
    return ids_TK, weights_TK, counts_PE.sum(0), chosen_TK


def route_backward(
    ids_TK: Tensor,
    chosen_TK: Tensor | None,
    logits_TE: Tensor | None,
    grad_TK: Tensor,
    choice: Choice,
    num_experts: int,
) -> Tensor:
    """Return the gradient of the logits, given that of weights; ``logits_TE`` if they are scores of a softmax."""
    tokens, k = ids_TK.shape
    grad_logits_TE = torch.empty(tokens, num_experts, dtype=torch.float32, device=ids_TK.device)
    width = triton.next_power_of_2(num_experts)
    if tokens:
        each = together(width)
        _backward_kernel[(triton.cdiv(tokens, each),)](
            ids_TK, chosen_TK, contiguous(logits_TE), contiguous(grad_TK), grad_logits_TE,
            tokens, num_experts, choice.scale,
            *_kind(choice), width, k, triton.next_power_of_2(k), each, is_compiled(),
        )  # fmt: skip
    return grad_logits_TE


def _kind(choice: Choice) -> tuple[Any, ...]:
    return choice.score, choice.pre_softmax, choice.renormalise
