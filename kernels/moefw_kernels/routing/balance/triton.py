"""Triton kernels of the sums over tokens, and of the Switch loss.

Rows lie one after another. A program adds up the tokens of a block, row by row, and stores a part for each row of which
it has some. That of block b and row r is at place b + r: from one to the next the block or the row goes up, or both, so
no two share a place. The parts of a row lie side by side, and are added up in their order. A part holds masses (E),
counts (E), valid tokens, and the z-loss.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import is_compiled
from moefw_kernels.routing.balance.sums import Rows
from moefw_kernels.routing.choice import Choice
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
"""Starts of rows that are stored at once for a token."""
PARTS, COLUMNS = 128, 16
"""Parts of a row, and numbers of each, that a program adds up at once."""
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
    """Return 1 for tokens that count, 0 for others."""
    valid = inside.to(tl.float32)
    if present is not None:
        valid = tl.load(present + t, mask=inside, other=0).to(tl.float32)
    return valid


@triton.jit
def _log_sum_exp(x, COMPILED: tl.constexpr):
    """Return that of each row, which may be infinite."""
    most = tl.max(x, 1)
    most = tl.where(tl.abs(most) == float("inf"), 0.0, most)
    return log(tl.sum(exp(x - most[:, None], COMPILED), 1), COMPILED) + most


@triton.jit
def _piece(row_of, block, start, end, each, TOKENS: tl.constexpr):
    """Return the row of the token at ``start`` of a block, and where its tokens stop, at ``end`` if not before."""
    if row_of is None:
        row = (block * TOKENS + start) // each
        stop = tl.minimum(end, (row + 1) * each - block * TOKENS)
    else:
        row, place = tl.load(row_of + start).to(tl.int32), tl.arange(0, TOKENS)
        stop = start + tl.sum((tl.load(row_of + place, mask=place < end, other=-1) == row).to(tl.int32), 0)
    return row, stop


@triton.jit
def _store_starts(starts, row_of, block, tokens, rows, TOKENS: tl.constexpr):
    """Store where rows start that begin in a block. A row without tokens starts where the next one does.

    Behind the last token is one of a row behind the last, so that the starts of all rows, and their end, are stored.
    """
    place, more = tl.arange(0, TOKENS), 1 + tl.arange(0, _STARTS)
    t = block * TOKENS + place
    row = tl.load(row_of + place, mask=t < tokens, other=rows).to(tl.int32)
    before = tl.load(row_of + place - 1, mask=(t > 0) & (t <= tokens), other=rows).to(tl.int32)
    before = tl.where(t == 0, -1, before)
    for first in range(0, tl.max(row - before, 0), _STARTS):
        at = before[:, None] + first + more[None, :]
        tl.store(starts + at, tl.broadcast_to(t[:, None], at.shape), mask=at <= row[:, None])


@triton.jit
def _sums_kernel(
    logits, ids, present, row_of, parts, starts, tokens, num_experts, each, rows, width, z_coeff,
    SCORE: tl.constexpr, SHARES: tl.constexpr, Z: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    E: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Add up ``TOKENS`` tokens, row by row: shares, choices, valid tokens, z-losses. Store where their rows start."""
    block = tl.program_id(0)
    expert, k = tl.arange(0, E), tl.arange(0, KP)[None, :]
    exists = expert < num_experts
    begin = block.to(tl.int64) * TOKENS
    logits += begin * num_experts
    if ids is not None:
        ids += begin * K
    if present is not None:
        present += begin
    if row_of is not None:
        row_of += begin
    start, end = 0, tl.minimum(TOKENS, tokens - block * TOKENS)
    while start < end:
        row, stop = _piece(row_of, block, start, end, each, TOKENS)
        mass, count = tl.zeros((E,), tl.float32), tl.zeros((E,), tl.int32)
        seen, z = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
        for first in range(start, stop, N):
            t = first + tl.arange(0, N)
            inside = t < stop
            x, valid = _logits(logits, t, expert, inside, num_experts), _valid(present, t, inside)
            seen += valid
            if SHARES:
                if SCORE == "softmax":
                    share, by = softmax(x, COMPILED), x
                else:
                    by = score_of(x, SCORE, COMPILED)
                    score = tl.where(exists[None, :], by, 0.0)
                    total = tl.maximum(tl.sum(score, 1), TINY)
                    share = tl.div_rn(score, tl.broadcast_to(total[:, None], score.shape))
                mass += tl.sum(share * valid[:, None], 0)
                if ids is None:
                    keys = tl.where(exists[None, :], keys_of(by, expert[None, :], E), NONE)
                    for _ in range(K):
                        keys = tl.where(keys == tl.max(keys, 1)[:, None], NONE, keys)
                    count += tl.sum(((keys == NONE) & (valid != 0.0)[:, None]).to(tl.int32), 0)
                else:
                    given = inside[:, None] & (k < K)
                    id_NK = tl.load(ids + t[:, None] * K + k, mask=given, other=-1).to(tl.int32)
                    for choice in range(K):
                        one = tl.sum(tl.where(k == choice, id_NK, 0), 1)[:, None]
                        count += tl.sum((expert[None, :] == one).to(tl.int32), 0)
            if Z:
                lse = _log_sum_exp(x, COMPILED)
                z += lse * lse * valid
        part = parts + (block + row).to(tl.int64) * width
        if SHARES:
            tl.store(part + expert, mass, mask=exists)
            tl.store(part + num_experts + expert, count.to(tl.float32), mask=exists)
            tl.store(part + 2 * num_experts, tl.sum(seen, 0))
            part += 2 * num_experts + 1
        if Z:
            tl.store(part, tl.sum(z, 0) * z_coeff)
        start = stop
    if row_of is not None:
        _store_starts(starts, row_of, block, tokens, rows, TOKENS)


@triton.jit
def _add_up_kernel(
    parts, starts, sums, each, rows, masses, seen, numbers, width,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up some ``numbers`` of a row's parts: ``masses`` of them are masses, ``seen`` are counts and valid tokens."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if starts is None:
        start, end = row * each, (row + 1) * each
    else:
        start, end = tl.load(starts + row), tl.load(starts + row + 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    last = tl.where(end > start, row + (end - 1) // TOKENS, -1)
    for first in range(row + start // TOKENS, last + 1, PARTS):
        part = (first + tl.arange(0, PARTS))[:, None]
        found = tl.load(parts + part * width + column[None, :], mask=part <= last, other=0.0)
        total += tl.sum(found, 0)
    at = rows * (masses + seen) + row
    at = tl.where(column < masses + seen, rows * masses + row * seen + column - masses, at)
    at = tl.where(column < masses, row * masses + column, at)
    tl.store(sums + at, total, mask=column < numbers)


@triton.jit
def _sums_backward_kernel(
    logits, present, row_of, grad_mass, grad_z, grad_logits, tokens, num_experts, each, z_coeff,
    SCORE: tl.constexpr, E: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of N tokens' logits."""
    t, expert = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N), tl.arange(0, E)
    inside, exists = t < tokens, expert < num_experts
    x, valid = _logits(logits, t, expert, inside, num_experts), _valid(present, t, inside)
    there = inside[:, None] & exists[None, :]
    found = tl.zeros((N, E), tl.float32)
    if grad_mass is not None:
        row = t // each if row_of is None else tl.load(row_of + t, mask=inside, other=0)
        of_row = grad_mass + row[:, None] * num_experts + expert[None, :]
        grad = tl.load(of_row, mask=there, other=0.0) * valid[:, None]
        if SCORE == "softmax":
            share = softmax(x, COMPILED)
            found = share * (grad - tl.sum(grad * share, 1)[:, None])
        else:
            score = tl.where(exists[None, :], score_of(x, SCORE, COMPILED), 0.0)
            total = tl.sum(score, 1)[:, None]
            by = tl.broadcast_to(tl.maximum(total, TINY), score.shape)
            flow = tl.where(total >= TINY, tl.sum(grad * tl.div_rn(score, by), 1)[:, None], 0.0)
            found = tl.div_rn(grad - flow, by) * slope_of(x, score, SCORE, COMPILED)
    if grad_z is not None:
        lse = _log_sum_exp(x, COMPILED)
        of_lse = tl.load(grad_z) * z_coeff * valid * (2.0 * lse)
        found += of_lse[:, None] * exp(x - lse[:, None], COMPILED)
    tl.store(grad_logits + t[:, None] * num_experts + expert[None, :], found, mask=there)


@triton.jit
def _load(seen, row, expert, there, num_experts):
    """Return each expert's share of the choices of a row, times the choices of a token."""
    at = seen + row * (num_experts + 1)
    tokens = tl.load(at + num_experts, mask=there, other=1.0)
    return tl.div_rn(tl.load(at + expert, mask=there, other=0.0), tl.maximum(tokens, 1.0))


@triton.jit
def _switch_kernel(mass, seen, loss, rows, num_experts, coeff, E: tl.constexpr, N: tl.constexpr):
    """Add up the loss of all rows, N at a time."""
    expert = tl.arange(0, E)[None, :]
    total = tl.zeros((N, E), tl.float32)
    for start in range(0, rows, N):
        row = (start + tl.arange(0, N).to(tl.int64))[:, None]
        there = (row < rows) & (expert < num_experts)
        load = _load(seen, row, expert, there, num_experts)
        total += tl.load(mass + row * num_experts + expert, mask=there, other=0.0) * load
    tl.store(loss, tl.sum(total) * coeff)


@triton.jit
def _switch_backward_kernel(seen, grad, grad_mass, rows, num_experts, coeff, E: tl.constexpr, N: tl.constexpr):
    """Compute the gradients of N rows' masses."""
    row, expert = (tl.program_id(0).to(tl.int64) * N + tl.arange(0, N))[:, None], tl.arange(0, E)[None, :]
    there = (row < rows) & (expert < num_experts)
    load = _load(seen, row, expert, there, num_experts)
    tl.store(grad_mass + row * num_experts + expert, load * (tl.load(grad) * coeff), mask=there)


def token_sums(
    logits_TE: Tensor,
    choice: Choice,
    ids_TK: Tensor | None,
    mask_T: Tensor | None,
    rows: Rows | None,
    z_coeff: float | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Implement ``moefw_kernels.routing.token_sums`` for fp32 and one of ``over``.

    Return ``mass_RE`` and ``seen_RX``, None without ``rows``, and the z-loss, None without ``z_coeff``.
    """
    (tokens, experts), logits_TE = logits_TE.shape, logits_TE.contiguous()
    shares, z, num_rows = rows is not None, z_coeff is not None, 1 if rows is None else rows.count
    masses, seen = shares * experts, shares * (experts + 1)
    numbers, sizes = masses + seen + z, (num_rows * masses, num_rows * seen, num_rows * z)
    row_T, each = _rows_of(rows, tokens)
    sums = (logits_TE.new_empty if tokens else logits_TE.new_zeros)(sum(sizes))
    if tokens:
        tile, columns = triton.next_power_of_2(experts), triton.cdiv(numbers, COLUMNS)
        blocks = triton.cdiv(tokens + (row_T is not None), TOKENS)
        parts = logits_TE.new_empty(blocks + num_rows - 1, columns * COLUMNS)
        starts = None if row_T is None else torch.empty(num_rows + 1, dtype=torch.int32, device=row_T.device)
        _sums_kernel[(blocks,)](
            logits_TE, contiguous(ids_TK), contiguous(mask_T), row_T, parts, starts, tokens, experts, each, num_rows,
            parts.shape[1], z_coeff or 0.0, choice.score, shares, z, choice.k, triton.next_power_of_2(choice.k),
            tile, TOKENS, min(TOKENS, together(tile)), is_compiled(),
        )  # fmt: skip
        _add_up_kernel[(num_rows, columns)](
            parts, starts, sums, each, num_rows, masses, seen, numbers, parts.shape[1], TOKENS, PARTS, COLUMNS
        )
    mass, seen_RX, z_R = sums.split(sizes)
    loss = (z_R.view(()) if num_rows == 1 else z_R.sum()) if z else None
    if not shares:
        return None, None, loss
    return mass.view(num_rows, experts), seen_RX.view(num_rows, experts + 1), loss


def token_sums_backward(
    logits_TE: Tensor,
    score: str,
    mask_T: Tensor | None,
    rows: Rows | None,
    z_coeff: float | None,
    grad_RE: Tensor | None,
    grad_z: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits, given those of ``mass_RE`` and of the z-loss."""
    (tokens, experts), logits_TE = logits_TE.shape, logits_TE.contiguous()
    grad_logits_TE = torch.empty_like(logits_TE)
    width = triton.next_power_of_2(experts)
    row_T, each = _rows_of(rows, tokens)
    if tokens:
        together_T = together(width)
        _sums_backward_kernel[(triton.cdiv(tokens, together_T),)](
            logits_TE, contiguous(mask_T), row_T, contiguous(grad_RE), grad_z, grad_logits_TE, tokens, experts,
            each, z_coeff or 0.0, score, width, together_T, is_compiled(),
        )  # fmt: skip
    return grad_logits_TE


def _rows_of(rows: Rows | None, tokens: int) -> tuple[Tensor | None, int]:
    """Return the row of each token, or None and how many tokens each row has."""
    if rows is None or rows.row_T is None:
        count = 1 if rows is None else rows.count
        each = tokens // max(1, count)
        assert tokens == count * each, "rows have equally many tokens"
        return None, each
    assert len(rows.row_T) == tokens, "each token has a row"
    return rows.row_T.contiguous(), 0


def switch_loss(mass_RE: Tensor, seen_RX: Tensor, coeff: float) -> Tensor:
    """Implement ``moefw_kernels.routing.switch_loss`` for fp32; ``coeff`` is that of the loss times E / K."""
    loss = mass_RE.new_empty(())
    rows, experts, *tile = _tile(seen_RX)
    _switch_kernel[(1,)](mass_RE.contiguous(), seen_RX.contiguous(), loss, rows, experts, coeff, *tile)
    return loss


def switch_loss_backward(seen_RX: Tensor, grad: Tensor, coeff: float) -> Tensor:
    """Return the gradient of ``mass_RE``, given that of the loss."""
    rows, experts, *tile = _tile(seen_RX)
    grad_RE = seen_RX.new_empty(rows, experts)
    if rows:
        grid = (triton.cdiv(rows, tile[1]),)
        _switch_backward_kernel[grid](seen_RX.contiguous(), grad, grad_RE, rows, experts, coeff, *tile)
    return grad_RE


def _tile(seen_RX: Tensor) -> tuple[int, int, int, int]:
    """Return the number of rows and of experts, the width of a tile and the rows in it."""
    rows, experts = len(seen_RX), seen_RX.shape[1] - 1
    width = triton.next_power_of_2(experts)
    return rows, experts, width, min(triton.next_power_of_2(max(1, rows)), ROWS_TOGETHER * together(width))
