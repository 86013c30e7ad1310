"""Triton kernels of the router's choice. A program routes some tokens, a few at a time.

Experts lie in groups, each padded to a power of two: expert ``g * SIZE + s`` at place ``g * S + s``. An expert is
chosen by a key, unique among a token's experts: a float's bits as an integer of the same order, then the lower number
first.

Sizes: N tokens at a time, G groups of S places, K choices, KP the power of two above K.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import is_compiled
from moefw_kernels.routing.gating import Gating
from moefw_kernels.routing.in_kernels import (
    NONE,
    contiguous,
    entropy_of,
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
TAIL: Final = tl.constexpr(4)
"""Numbers behind the counts in a row, of which two are used: 16 bytes, so that rows stay aligned for wide stores."""


@triton.jit
def _only_best_groups(
    keys, GROUPS: tl.constexpr, KEEP: tl.constexpr, BEST: tl.constexpr,
    N: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Keys, with the key of -inf outside the ``KEEP`` groups whose ``BEST`` best have the largest sum."""
    keys_NGS = tl.reshape(keys, (N, G, S))
    # The sum of the best of each group: the largest key BEST times, each time without the one before.
    remaining = keys_NGS
    worth = tl.zeros((N, G), tl.float32)
    for _ in range(BEST):
        best = tl.max(remaining, 2)
        worth += value_of(best)
        remaining = tl.where(remaining == best[:, :, None], NONE, remaining)
    group = tl.arange(0, G)[None, :]
    of_group = tl.where(group < GROUPS, keys_of(worth, group, G), NONE)
    is_kept = tl.zeros((N, G), tl.int1)
    for _ in range(KEEP):
        best = tl.max(of_group, 1)[:, None]
        is_kept = is_kept | (of_group == best)
        of_group = tl.where(of_group == best, NONE, of_group)
    # As in the reference -inf and not gone: a token for which these groups have fewer than K experts takes others, in
    # the order of their numbers.
    lost = (ordered(tl.full((N, G, S), float("-inf"), tl.float32)) << 32) | (keys_NGS & 0xFFFFFFFF)
    keys_NGS = tl.where(is_kept[:, :, None] | (keys_NGS == NONE), keys_NGS, lost)
    return tl.reshape(keys_NGS, (N, G * S))


@triton.jit
def _route_kernel(
    logits, bias, present, ids, weights, counts, chosen, tokens, num_experts, scale,
    SCORE: tl.constexpr, PRE: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, KEEP: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr,
    G: tl.constexpr, S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    TOKENS: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Choose the experts of ``TOKENS`` tokens, weigh them, and count them.

    A program's row of ``counts`` has those of each expert, the sum of the entropies of its tokens, and their number.
    """
    program = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, G * S)
    expert = place // S * SIZE + place % S
    has_expert = (place % S < SIZE) & (place // S < GROUPS)
    k = tl.arange(0, KP)[None, :]
    count = tl.zeros((G * S,), tl.int32)
    entropy = tl.zeros((N,), tl.float32)
    seen = tl.zeros((N,), tl.float32)
    for start in range(0, TOKENS, N):
        t = program * TOKENS + start + tl.arange(0, N)
        routed = t < tokens
        # Logits: (N, G * S).
        at = t[:, None] * num_experts + expert[None, :]
        inside = routed[:, None] & has_expert[None, :]
        logit = tl.where(has_expert[None, :], tl.load(logits + at, mask=inside, other=0.0), float("-inf"))
        # Keys, by the ranking: logits or scores, plus the bias. Weights come from ``value``, without the bias.
        if SCORE != "softmax":
            ranking = score_of(logit, SCORE, COMPILED)
        elif PRE:
            ranking = softmax(logit, COMPILED)
        else:
            ranking = logit
        value = ranking if PRE else logit
        if SCORE == "softmax" and not PRE:
            shares = softmax(logit, COMPILED)
        else:
            shares = tl.where(has_expert[None, :], ranking, 0.0)
        entropy_N = entropy_of(shares, COMPILED)
        if bias is not None:
            ranking += tl.load(bias + expert, mask=has_expert, other=0.0)[None, :]
        keys = tl.where(has_expert[None, :], keys_of(ranking, place[None, :], G * S), NONE)
        if GROUPS > 1:
            keys = _only_best_groups(keys, GROUPS=GROUPS, KEEP=KEEP, BEST=BEST, N=N, G=G, S=S)
        # Choices: K times the largest key, which is then taken out. A key says at which place it was.
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
        entropy += tl.where(routed, entropy_N, 0.0)
        seen += routed.to(tl.float32)
        # Keys that were taken out are those of chosen experts; places without an expert are not stored.
        count += tl.sum(((keys == NONE) & routed[:, None]).to(tl.int32), 0)
        # Weights of the choices: (N, KP).
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
    counts += program * (num_experts + TAIL.value)
    tl.store(counts + expert, count.to(tl.float32), mask=has_expert)
    # In one store: two numbers on their own would be two narrow ones.
    tail = tl.arange(0, TAIL.value)
    sums = tl.where(tail == 0, tl.sum(entropy, 0), tl.where(tail == 1, tl.sum(seen, 0), 0.0))
    tl.store(counts + num_experts + tail, sums)


@triton.jit
def _backward_kernel(
    ids, chosen, logits, grad_weights, grad_logits, tokens, num_experts, scale,
    SCORE: tl.constexpr, PRE: tl.constexpr, RENORMALISE: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of N tokens' logits. A choice that is absent has none.

    First the gradients of the numbers from which weights are computed, (N, KP), then spread over all experts, (N, E).
    """
    t = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    k = tl.arange(0, KP)[None, :]
    expert = tl.arange(0, E)[None, :]
    of_choice = t[:, None] * K + k
    has_choice = (t < tokens)[:, None] & (k < K)
    id_NK = tl.load(ids + of_choice, mask=has_choice, other=-1).to(tl.int32)
    grad = tl.where(id_NK >= 0, tl.load(grad_weights + of_choice, mask=has_choice, other=0.0) * scale, 0.0)
    if not PRE:
        x = tl.load(chosen + of_choice, mask=has_choice, other=0.0)
        if SCORE == "softmax":
            share = softmax(tl.where(k < K, x, float("-inf")), COMPILED)
            grad = share * (grad - tl.sum(grad * share, 1)[:, None])
        else:
            score = tl.where(k < K, score_of(x, SCORE, COMPILED), 0.0)
            if RENORMALISE:
                total = tl.broadcast_to(tl.sum(score, 1)[:, None] + 1e-20, score.shape)
                grad = tl.div_rn(grad - tl.sum(grad * tl.div_rn(score, total), 1)[:, None], total)
            grad *= tl.where(k < K, slope_of(x, score, SCORE, COMPILED), 0.0)
    # By comparison, choice by choice, so that no atomic adds decide an order.
    spread = tl.zeros((N, E), tl.float32)
    for choice in range(K):
        hit = expert == tl.sum(tl.where(k == choice, id_NK, 0), 1)[:, None]
        spread += tl.where(hit, tl.sum(tl.where(k == choice, grad, 0.0), 1)[:, None], 0.0)
    at = t[:, None] * num_experts + expert
    inside = (t < tokens)[:, None] & (expert < num_experts)
    if PRE:
        # Weights are scores of a softmax over all experts, whose gradient reaches all logits.
        x = tl.where(expert < num_experts, tl.load(logits + at, mask=inside, other=0.0), float("-inf"))
        share = softmax(x, COMPILED)
        spread = share * (spread - tl.sum(share * spread, 1)[:, None])
    tl.store(grad_logits + at, spread, mask=inside)


def route(
    logits_TE: Tensor, gating: Gating, bias_E: Tensor | None, mask_T: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """Implement ``moefw_kernels.routing.route`` for fp32: ids, weights, counts and entropy, and also the chosen logits.

    Of these, fp32 (T, K), the weights are computed. None with ``pre_softmax``, where weights are scores of a softmax
    over all logits. Counts and entropy share one storage.
    """
    tokens, experts = logits_TE.shape
    k = gating.k
    # Without groups, all experts are one group of which one is kept.
    count, keep, best = gating.groups or (1, 1, 1)
    group_size = experts // count
    places = triton.next_power_of_2(group_size)
    groups = triton.next_power_of_2(count)
    programs = triton.cdiv(tokens, TOKENS)
    ids_TK = logits_TE.new_empty(tokens, k, dtype=torch.int64)
    weights_TK = logits_TE.new_empty(tokens, k)
    chosen_TK = None if gating.pre_softmax else logits_TE.new_empty(tokens, k)
    counts_PX = logits_TE.new_empty(programs, experts + TAIL.value)
    if tokens:
        _route_kernel[(programs,)](
            logits=logits_TE.contiguous(),
            bias=contiguous(bias_E),
            present=contiguous(mask_T),
            ids=ids_TK,
            weights=weights_TK,
            counts=counts_PX,
            chosen=chosen_TK,
            tokens=tokens,
            num_experts=experts,
            scale=gating.scale,
            SCORE=gating.score,
            PRE=gating.pre_softmax,
            RENORMALISE=gating.renormalise,
            GROUPS=count,
            KEEP=keep,
            BEST=best,
            SIZE=group_size,
            G=groups,
            S=places,
            K=k,
            KP=triton.next_power_of_2(k),
            TOKENS=TOKENS,
            N=min(TOKENS, together(groups * places)),
            COMPILED=is_compiled(),
        )
    counts_E, entropy, _ = counts_PX.sum(0).split((experts, 2, TAIL.value - 2))
    return (ids_TK, weights_TK, counts_E, entropy), chosen_TK


def route_backward(
    ids_TK: Tensor,
    chosen_TK: Tensor | None,
    logits_TE: Tensor | None,
    grad_TK: Tensor,
    gating: Gating,
    num_experts: int,
) -> Tensor:
    """Gradient of the logits, fp32 (T, E), given ``grad_TK``, the gradient of the weights.

    ``chosen_TK`` are the chosen logits, from ``route``. With ``pre_softmax`` it is None, and ``logits_TE`` are given.
    """
    tokens, k = ids_TK.shape
    grad_logits_TE = torch.empty(tokens, num_experts, dtype=torch.float32, device=ids_TK.device)
    width = triton.next_power_of_2(num_experts)
    if tokens:
        tokens_of_program = together(width)
        _backward_kernel[(triton.cdiv(tokens, tokens_of_program),)](
            ids=ids_TK,
            chosen=chosen_TK,
            logits=contiguous(logits_TE),
            grad_weights=grad_TK.contiguous(),
            grad_logits=grad_logits_TE,
            tokens=tokens,
            num_experts=num_experts,
            scale=gating.scale,
            SCORE=gating.score,
            PRE=gating.pre_softmax,
            RENORMALISE=gating.renormalise,
            E=width,
            K=k,
            KP=triton.next_power_of_2(k),
            N=tokens_of_program,
            COMPILED=is_compiled(),
        )
    return grad_logits_TE
