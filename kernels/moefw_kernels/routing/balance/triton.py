"""Triton kernels of the sums over tokens, and of the Switch loss.

Segments lie one after another. A program adds up the tokens of a block, segment by segment, and stores a part for each
segment of which it has some. That of block b and segment g is at place b + g: from one to the next the block or the
segment goes up, or both, so no two share a place. The parts of a segment lie side by side, and are added up in their
order. A part holds masses (E), counts (E), valid tokens, and the z-loss.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import is_compiled
from moefw_kernels.routing.balance.sums import Segments
from moefw_kernels.routing.gating import Gating
from moefw_kernels.routing.in_kernels import (
    NONE,
    TINY,
    contiguous,
    exp,
    keys_of,
    log,
    score_of,
    slope_of,
    softmax,
    together,
)

TOKENS: Final = 32
"""Tokens of a block."""
_STARTS: Final = tl.constexpr(4)
"""Starts of segments that are stored at once for each token of a block."""
PARTS: Final = 128
"""Parts of a segment that a program adds up at once."""
COLUMNS: Final = 16
"""Numbers of each part that a program adds up."""
ROWS_TOGETHER: Final = 4
"""How many times more experts a program of the Switch loss looks at together."""


@triton.jit
def _logits(logits, t, expert, inside, num_experts):
    """Load the logits of tokens: -inf for experts that do not exist, 0 for tokens that do not."""
    at = t[:, None] * num_experts + expert[None, :]
    exists = expert[None, :] < num_experts
    return tl.where(exists, tl.load(logits + at, mask=inside[:, None] & exists, other=0.0), float("-inf"))


@triton.jit
def _valid(present, t, inside):
    """1 for tokens that count, 0 for others."""
    valid = inside.to(tl.float32)
    if present is not None:
        valid = tl.load(present + t, mask=inside, other=0).to(tl.float32)
    return valid


@triton.jit
def _log_sum_exp(x, COMPILED: tl.constexpr):
    """Log-sum-exp of each row, which may be infinite."""
    largest = tl.max(x, 1)
    # Infinity is not subtracted: inf - inf would be NaN.
    largest = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    return log(tl.sum(exp(x - largest[:, None], COMPILED), 1), COMPILED) + largest


@triton.jit
def _piece(segment_of, block, start, end, segment_tokens, TOKENS: tl.constexpr):
    """Segment of the token at ``start`` of a block, and where its tokens stop, at ``end`` if not before.

    ``segment_of``: the segment of each token from the beginning of the block on, ascending; None: each segment has
    ``segment_tokens``.
    """
    if segment_of is None:
        segment = (block * TOKENS + start) // segment_tokens
        stop = tl.minimum(end, (segment + 1) * segment_tokens - block * TOKENS)
    else:
        segment = tl.load(segment_of + start).to(tl.int32)
        place = tl.arange(0, TOKENS)
        stop = start + tl.sum((tl.load(segment_of + place, mask=place < end, other=-1) == segment).to(tl.int32), 0)
    return segment, stop


@triton.jit
def _store_starts(starts, segment_of, block, tokens, segments, TOKENS: tl.constexpr):
    """Store where segments start that begin in a block. A segment without tokens starts where the next one does.

    The place behind the last token counts as a token in a segment behind the last one. It stores the starts of the
    segments without tokens at the end, and the end of all segments.
    """
    place = tl.arange(0, TOKENS)
    following = 1 + tl.arange(0, _STARTS)
    t = block * TOKENS + place
    segment = tl.load(segment_of + place, mask=t < tokens, other=segments).to(tl.int32)
    before = tl.load(segment_of + place - 1, mask=(t > 0) & (t <= tokens), other=segments).to(tl.int32)
    before = tl.where(t == 0, -1, before)
    # A token in segment g behind one in segment b is the start of segments b + 1 to g, of which all but the last have
    # no tokens.
    for first in range(0, tl.max(segment - before, 0), _STARTS):
        at = before[:, None] + first + following[None, :]
        tl.store(starts + at, tl.broadcast_to(t[:, None], at.shape), mask=at <= segment[:, None])


@triton.jit
def _sums_kernel(
    logits, ids, present, segment_of, parts, starts, tokens, num_experts, segment_tokens, segments, width, z_coeff,
    SCORE: tl.constexpr, SHARES: tl.constexpr, Z: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    E: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Add up ``TOKENS`` tokens, segment by segment: shares, choices, valid tokens, z-losses. Store where these start.

    A part has ``width`` numbers, of which these are used: the mass of each expert, its count, the number of valid
    tokens, the z-loss. Without ``ids``, the K best experts of each token are found here.
    """
    block = tl.program_id(0)
    expert = tl.arange(0, E)
    k = tl.arange(0, KP)[None, :]
    exists = expert < num_experts
    begin = block.to(tl.int64) * TOKENS
    logits += begin * num_experts
    if ids is not None:
        ids += begin * K
    if present is not None:
        present += begin
    if segment_of is not None:
        segment_of += begin
    start = 0
    end = tl.minimum(TOKENS, tokens - block * TOKENS)
    while start < end:
        segment, stop = _piece(segment_of, block, start, end, segment_tokens, TOKENS)
        mass = tl.zeros((E,), tl.float32)
        count = tl.zeros((E,), tl.int32)
        seen = tl.zeros((N,), tl.float32)
        z = tl.zeros((N,), tl.float32)
        for first in range(start, stop, N):
            t = first + tl.arange(0, N)
            inside = t < stop
            x = _logits(logits, t, expert, inside, num_experts)
            valid = _valid(present, t, inside)
            seen += valid
            if SHARES:
                # Shares of the probability: (N, E).
                if SCORE == "softmax":
                    share = softmax(x, COMPILED)
                    ranking = x
                else:
                    ranking = score_of(x, SCORE, COMPILED)
                    score = tl.where(exists[None, :], ranking, 0.0)
                    total = tl.maximum(tl.sum(score, 1), TINY)
                    share = tl.div_rn(score, tl.broadcast_to(total[:, None], score.shape))
                mass += tl.sum(share * valid[:, None], 0)
                # Choices: the K largest keys are taken out and counted, or those of the router are counted.
                if ids is None:
                    keys = tl.where(exists[None, :], keys_of(ranking, expert[None, :], E), NONE)
                    for _ in range(K):
                        keys = tl.where(keys == tl.max(keys, 1)[:, None], NONE, keys)
                    count += tl.sum(((keys == NONE) & (valid != 0.0)[:, None]).to(tl.int32), 0)
                else:
                    has_id = inside[:, None] & (k < K)
                    id_NK = tl.load(ids + t[:, None] * K + k, mask=has_id, other=-1).to(tl.int32)
                    for choice in range(K):
                        id_N1 = tl.sum(tl.where(k == choice, id_NK, 0), 1)[:, None]
                        count += tl.sum((expert[None, :] == id_N1).to(tl.int32), 0)
            if Z:
                lse = _log_sum_exp(x, COMPILED)
                z += lse * lse * valid
        # Segments ascend with blocks, so block + segment numbers each (block, segment) with tokens differently, and the
        # parts of a segment lie side by side.
        part = parts + (block + segment).to(tl.int64) * width
        if SHARES:
            tl.store(part + expert, mass, mask=exists)
            tl.store(part + num_experts + expert, count.to(tl.float32), mask=exists)
            tl.store(part + 2 * num_experts, tl.sum(seen, 0))
            part += 2 * num_experts + 1
        if Z:
            tl.store(part, tl.sum(z, 0) * z_coeff)
        start = stop
    if segment_of is not None:
        _store_starts(starts, segment_of, block, tokens, segments, TOKENS)


@triton.jit
def _add_up_kernel(
    parts, starts, sums, segment_tokens, segments, masses, seen, numbers, width,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up some numbers of a segment's parts, in the order of the parts.

    A part has ``numbers`` of them: ``masses`` masses, then ``seen`` counts with the number of valid tokens, then the
    z-loss if there is one. ``sums`` holds the masses of all segments, then what they have seen, then their z-losses.
    """
    segment = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if starts is None:
        start = segment * segment_tokens
        end = (segment + 1) * segment_tokens
    else:
        start = tl.load(starts + segment)
        end = tl.load(starts + segment + 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    last = tl.where(end > start, segment + (end - 1) // TOKENS, -1)
    for first in range(segment + start // TOKENS, last + 1, PARTS):
        part = (first + tl.arange(0, PARTS))[:, None]
        values = tl.load(parts + part * width + column[None, :], mask=part <= last, other=0.0)
        total += tl.sum(values, 0)
    at = segments * (masses + seen) + segment
    at = tl.where(column < masses + seen, segments * masses + segment * seen + column - masses, at)
    at = tl.where(column < masses, segment * masses + column, at)
    tl.store(sums + at, total, mask=column < numbers)


@triton.jit
def _sums_backward_kernel(
    logits, present, segment_of, grad_mass, grad_z, grad_logits, tokens, num_experts, segment_tokens, z_coeff,
    SCORE: tl.constexpr, E: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of N tokens' logits, given those of the masses and of the z-loss."""
    t = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    expert = tl.arange(0, E)
    inside = t < tokens
    exists = expert < num_experts
    x = _logits(logits, t, expert, inside, num_experts)
    valid = _valid(present, t, inside)
    inside_NE = inside[:, None] & exists[None, :]
    grad_x = tl.zeros((N, E), tl.float32)
    if grad_mass is not None:
        segment = t // segment_tokens if segment_of is None else tl.load(segment_of + t, mask=inside, other=0)
        of_segment = grad_mass + segment[:, None] * num_experts + expert[None, :]
        grad = tl.load(of_segment, mask=inside_NE, other=0.0) * valid[:, None]
        if SCORE == "softmax":
            share = softmax(x, COMPILED)
            grad_x = share * (grad - tl.sum(grad * share, 1)[:, None])
        else:
            # share = score / divisor, where divisor = max(sum of scores, TINY). A clamped sum passes no gradient.
            score = tl.where(exists[None, :], score_of(x, SCORE, COMPILED), 0.0)
            total = tl.sum(score, 1)[:, None]
            divisor = tl.broadcast_to(tl.maximum(total, TINY), score.shape)
            through_sum = tl.where(total >= TINY, tl.sum(grad * tl.div_rn(score, divisor), 1)[:, None], 0.0)
            grad_x = tl.div_rn(grad - through_sum, divisor) * slope_of(x, score, SCORE, COMPILED)
    if grad_z is not None:
        # The gradient of lse^2 is 2 lse times that of lse, which is the softmax.
        lse = _log_sum_exp(x, COMPILED)
        grad_lse = tl.load(grad_z) * z_coeff * valid * (2.0 * lse)
        grad_x += grad_lse[:, None] * exp(x - lse[:, None], COMPILED)
    tl.store(grad_logits + t[:, None] * num_experts + expert[None, :], grad_x, mask=inside_NE)


@triton.jit
def _load(seen, segment, expert, inside_NE, num_experts):
    """Each expert's share of the choices of a segment, times the choices of a token."""
    at = seen + segment * (num_experts + 1)
    tokens = tl.load(at + num_experts, mask=inside_NE, other=1.0)
    return tl.div_rn(tl.load(at + expert, mask=inside_NE, other=0.0), tl.maximum(tokens, 1.0))


@triton.jit
def _switch_kernel(mass, seen, loss, segments, num_experts, coeff, E: tl.constexpr, N: tl.constexpr):
    """Add up the loss of all segments, N at a time."""
    expert = tl.arange(0, E)[None, :]
    total = tl.zeros((N, E), tl.float32)
    for start in range(0, segments, N):
        segment = (start + tl.arange(0, N).to(tl.int64))[:, None]
        inside_NE = (segment < segments) & (expert < num_experts)
        load = _load(seen, segment, expert, inside_NE, num_experts)
        total += tl.load(mass + segment * num_experts + expert, mask=inside_NE, other=0.0) * load
    tl.store(loss, tl.sum(total) * coeff)


@triton.jit
def _switch_backward_kernel(seen, grad, grad_mass, segments, num_experts, coeff, E: tl.constexpr, N: tl.constexpr):
    """Compute the gradients of N segments' masses."""
    segment = (tl.program_id(0).to(tl.int64) * N + tl.arange(0, N))[:, None]
    expert = tl.arange(0, E)[None, :]
    inside_NE = (segment < segments) & (expert < num_experts)
    load = _load(seen, segment, expert, inside_NE, num_experts)
    tl.store(grad_mass + segment * num_experts + expert, load * (tl.load(grad) * coeff), mask=inside_NE)


def token_sums(
    logits_TE: Tensor,
    gating: Gating,
    ids_TK: Tensor | None,
    mask_T: Tensor | None,
    segments: Segments | None,
    z_coeff: float | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Implement ``moefw_kernels.routing.token_sums`` for fp32 and one of ``over``, or with ``segments`` None for none.

    Return ``mass_GE`` and ``seen_GX``, None without ``segments``, and the z-loss, None without ``z_coeff``.
    """
    tokens, experts = logits_TE.shape
    has_shares = segments is not None
    has_z = z_coeff is not None
    num_segments = 1 if segments is None else segments.count
    num_masses = experts if has_shares else 0
    num_seen = experts + 1 if has_shares else 0
    num_z = 1 if has_z else 0
    numbers = num_masses + num_seen + num_z
    sizes = (num_segments * num_masses, num_segments * num_seen, num_segments * num_z)
    segment_T, segment_tokens = _segments_of(segments, tokens)
    if tokens:
        sums = logits_TE.new_empty(sum(sizes))
        tile = triton.next_power_of_2(experts)
        columns = triton.cdiv(numbers, COLUMNS)
        # The end of all segments is stored by a token behind the last, for which there may have to be a block.
        blocks = triton.cdiv(tokens if segment_T is None else tokens + 1, TOKENS)
        parts = logits_TE.new_empty(blocks + num_segments - 1, columns * COLUMNS)
        starts = (
            None if segment_T is None else torch.empty(num_segments + 1, dtype=torch.int32, device=segment_T.device)
        )
        _sums_kernel[(blocks,)](
            logits=logits_TE.contiguous(),
            ids=contiguous(ids_TK),
            present=contiguous(mask_T),
            segment_of=segment_T,
            parts=parts,
            starts=starts,
            tokens=tokens,
            num_experts=experts,
            segment_tokens=segment_tokens,
            segments=num_segments,
            width=parts.shape[1],
            z_coeff=z_coeff or 0.0,
            SCORE=gating.score,
            SHARES=has_shares,
            Z=has_z,
            K=gating.k,
            KP=triton.next_power_of_2(gating.k),
            E=tile,
            TOKENS=TOKENS,
            N=min(TOKENS, together(tile)),
            COMPILED=is_compiled(),
        )
        _add_up_kernel[(num_segments, columns)](
            parts=parts,
            starts=starts,
            sums=sums,
            segment_tokens=segment_tokens,
            segments=num_segments,
            masses=num_masses,
            seen=num_seen,
            numbers=numbers,
            width=parts.shape[1],
            TOKENS=TOKENS,
            PARTS=PARTS,
            COLUMNS=COLUMNS,
        )
    else:
        sums = logits_TE.new_zeros(sum(sizes))
    mass, seen, z_R = sums.split(sizes)
    z = None
    if has_z:
        # One segment needs no sum, and so no launch.
        z = z_R.view(()) if num_segments == 1 else z_R.sum()
    if not has_shares:
        return None, None, z
    return mass.view(num_segments, experts), seen.view(num_segments, experts + 1), z


def token_sums_backward(
    logits_TE: Tensor,
    score: str,
    mask_T: Tensor | None,
    segments: Segments | None,
    z_coeff: float | None,
    grad_GE: Tensor | None,
    grad_z: Tensor | None,
) -> Tensor:
    """Gradient of the logits, given those of ``mass_GE`` and of the z-loss."""
    tokens, experts = logits_TE.shape
    logits_TE = logits_TE.contiguous()
    grad_logits_TE = torch.empty_like(logits_TE)
    width = triton.next_power_of_2(experts)
    segment_T, segment_tokens = _segments_of(segments, tokens)
    if tokens:
        tokens_of_program = together(width)
        _sums_backward_kernel[(triton.cdiv(tokens, tokens_of_program),)](
            logits=logits_TE,
            present=contiguous(mask_T),
            segment_of=segment_T,
            grad_mass=contiguous(grad_GE),
            grad_z=grad_z,
            grad_logits=grad_logits_TE,
            tokens=tokens,
            num_experts=experts,
            segment_tokens=segment_tokens,
            z_coeff=z_coeff or 0.0,
            SCORE=score,
            E=width,
            N=tokens_of_program,
            COMPILED=is_compiled(),
        )
    return grad_logits_TE


def _segments_of(segments: Segments | None, tokens: int) -> tuple[Tensor | None, int]:
    """Row of each token and 0, or None and how many tokens each segment has."""
    if segments is None or segments.segment_T is None:
        count = 1 if segments is None else segments.count
        segment_tokens = tokens // max(1, count)
        assert tokens == count * segment_tokens, "segments have equally many tokens"
        return None, segment_tokens
    assert len(segments.segment_T) == tokens, "each token has a segment"
    return segments.segment_T.contiguous(), 0


def switch_loss(mass_GE: Tensor, seen_GX: Tensor, coeff: float) -> Tensor:
    """Implement ``moefw_kernels.routing.switch_loss`` for fp32; ``coeff`` is already multiplied by E / K."""
    loss = mass_GE.new_empty(())
    segments = len(seen_GX)
    experts = seen_GX.shape[1] - 1
    width, tile_rows = _tile(segments, experts)
    _switch_kernel[(1,)](
        mass=mass_GE.contiguous(),
        seen=seen_GX.contiguous(),
        loss=loss,
        segments=segments,
        num_experts=experts,
        coeff=coeff,
        E=width,
        N=tile_rows,
    )
    return loss


def switch_loss_backward(seen_GX: Tensor, grad: Tensor, coeff: float) -> Tensor:
    """Gradient of ``mass_GE``, given that of the loss."""
    segments = len(seen_GX)
    experts = seen_GX.shape[1] - 1
    width, tile_rows = _tile(segments, experts)
    grad_GE = seen_GX.new_empty(segments, experts)
    if segments:
        _switch_backward_kernel[(triton.cdiv(segments, tile_rows),)](
            seen=seen_GX.contiguous(),
            grad=grad,
            grad_mass=grad_GE,
            segments=segments,
            num_experts=experts,
            coeff=coeff,
            E=width,
            N=tile_rows,
        )
    return grad_GE


def _tile(segments: int, experts: int) -> tuple[int, int]:
    """Width of a tile and the number of its rows, each a segment, both powers of two."""
    width = triton.next_power_of_2(experts)
    return width, min(triton.next_power_of_2(max(1, segments)), ROWS_TOGETHER * together(width))
