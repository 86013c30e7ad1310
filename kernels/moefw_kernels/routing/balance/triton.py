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
"""Starts of rows that are stored at once for each token of a block."""
PARTS: Final = 128
"""Parts of a row that a program adds up at once."""
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
def _piece(row_of, block, start, end, row_tokens, TOKENS: tl.constexpr):
    """Row of the token at ``start`` of a block, and where its tokens stop, at ``end`` if not before.

    ``row_of``: the row of each token from the beginning of the block on, ascending; None: each row has ``row_tokens``.
    """
    if row_of is None:
        row = (block * TOKENS + start) // row_tokens
        stop = tl.minimum(end, (row + 1) * row_tokens - block * TOKENS)
    else:
        row = tl.load(row_of + start).to(tl.int32)
        place = tl.arange(0, TOKENS)
        stop = start + tl.sum((tl.load(row_of + place, mask=place < end, other=-1) == row).to(tl.int32), 0)
    return row, stop


@triton.jit
def _store_starts(starts, row_of, block, tokens, rows, TOKENS: tl.constexpr):
    """Store where rows start that begin in a block. A row without tokens starts where the next one does.

    The place behind the last token counts as a token in a row behind the last one. It stores the starts of the rows
    without tokens at the end, and the end of all rows.
    """
    place = tl.arange(0, TOKENS)
    following = 1 + tl.arange(0, _STARTS)
    t = block * TOKENS + place
    row = tl.load(row_of + place, mask=t < tokens, other=rows).to(tl.int32)
    before = tl.load(row_of + place - 1, mask=(t > 0) & (t <= tokens), other=rows).to(tl.int32)
    before = tl.where(t == 0, -1, before)
    # A token in row r behind one in row b is the start of rows b + 1 to r, of which all but the last have no tokens.
    for first in range(0, tl.max(row - before, 0), _STARTS):
        at = before[:, None] + first + following[None, :]
        tl.store(starts + at, tl.broadcast_to(t[:, None], at.shape), mask=at <= row[:, None])


@triton.jit
def _sums_kernel(
    logits, ids, present, row_of, parts, starts, tokens, num_experts, row_tokens, rows, width, z_coeff,
    SCORE: tl.constexpr, SHARES: tl.constexpr, Z: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    E: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Add up ``TOKENS`` tokens, row by row: shares, choices, valid tokens, z-losses. Store where their rows start.

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
    if row_of is not None:
        row_of += begin
    start = 0
    end = tl.minimum(TOKENS, tokens - block * TOKENS)
    while start < end:
        row, stop = _piece(row_of, block, start, end, row_tokens, TOKENS)
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
        # Rows ascend with blocks, so block + row numbers each (block, row) with tokens differently, and the parts of a
        # row lie side by side.
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
    parts, starts, sums, row_tokens, rows, masses, seen, numbers, width,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up some numbers of a row's parts, in the order of the parts.

    A part has ``numbers`` of them: ``masses`` masses, then ``seen`` counts with the number of valid tokens, then the
    z-loss if there is one. ``sums`` holds the masses of all rows, then what they have seen, then their z-losses.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if starts is None:
        start = row * row_tokens
        end = (row + 1) * row_tokens
    else:
        start = tl.load(starts + row)
        end = tl.load(starts + row + 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    last = tl.where(end > start, row + (end - 1) // TOKENS, -1)
    for first in range(row + start // TOKENS, last + 1, PARTS):
        part = (first + tl.arange(0, PARTS))[:, None]
        values = tl.load(parts + part * width + column[None, :], mask=part <= last, other=0.0)
        total += tl.sum(values, 0)
    at = rows * (masses + seen) + row
    at = tl.where(column < masses + seen, rows * masses + row * seen + column - masses, at)
    at = tl.where(column < masses, row * masses + column, at)
    tl.store(sums + at, total, mask=column < numbers)


@triton.jit
def _sums_backward_kernel(
    logits, present, row_of, grad_mass, grad_z, grad_logits, tokens, num_experts, row_tokens, z_coeff,
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
        row = t // row_tokens if row_of is None else tl.load(row_of + t, mask=inside, other=0)
        of_row = grad_mass + row[:, None] * num_experts + expert[None, :]
        grad = tl.load(of_row, mask=inside_NE, other=0.0) * valid[:, None]
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
def _load(seen, row, expert, inside_NE, num_experts):
    """Each expert's share of the choices of a row, times the choices of a token."""
    at = seen + row * (num_experts + 1)
    tokens = tl.load(at + num_experts, mask=inside_NE, other=1.0)
    return tl.div_rn(tl.load(at + expert, mask=inside_NE, other=0.0), tl.maximum(tokens, 1.0))


@triton.jit
def _switch_kernel(mass, seen, loss, rows, num_experts, coeff, E: tl.constexpr, N: tl.constexpr):
    """Add up the loss of all rows, N at a time."""
    expert = tl.arange(0, E)[None, :]
    total = tl.zeros((N, E), tl.float32)
    for start in range(0, rows, N):
        row = (start + tl.arange(0, N).to(tl.int64))[:, None]
        inside_NE = (row < rows) & (expert < num_experts)
        load = _load(seen, row, expert, inside_NE, num_experts)
        total += tl.load(mass + row * num_experts + expert, mask=inside_NE, other=0.0) * load
    tl.store(loss, tl.sum(total) * coeff)


@triton.jit
def _switch_backward_kernel(seen, grad, grad_mass, rows, num_experts, coeff, E: tl.constexpr, N: tl.constexpr):
    """Compute the gradients of N rows' masses."""
    row = (tl.program_id(0).to(tl.int64) * N + tl.arange(0, N))[:, None]
    expert = tl.arange(0, E)[None, :]
    inside_NE = (row < rows) & (expert < num_experts)
    load = _load(seen, row, expert, inside_NE, num_experts)
    tl.store(grad_mass + row * num_experts + expert, load * (tl.load(grad) * coeff), mask=inside_NE)


def token_sums(
    logits_TE: Tensor,
    choice: Choice,
    ids_TK: Tensor | None,
    mask_T: Tensor | None,
    rows: Rows | None,
    z_coeff: float | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Implement ``moefw_kernels.routing.token_sums`` for fp32 and one of ``over``, or with ``rows`` None for none.

    Return ``mass_RE`` and ``seen_RX``, None without ``rows``, and the z-loss, None without ``z_coeff``.
    """
    tokens, experts = logits_TE.shape
    has_shares = rows is not None
    has_z = z_coeff is not None
    num_rows = 1 if rows is None else rows.count
    num_masses = experts if has_shares else 0
    num_seen = experts + 1 if has_shares else 0
    num_z = 1 if has_z else 0
    numbers = num_masses + num_seen + num_z
    sizes = (num_rows * num_masses, num_rows * num_seen, num_rows * num_z)
    row_T, row_tokens = _rows_of(rows, tokens)
    if tokens:
        sums = logits_TE.new_empty(sum(sizes))
        tile = triton.next_power_of_2(experts)
        columns = triton.cdiv(numbers, COLUMNS)
        # The end of all rows is stored by a token behind the last, for which there may have to be a block.
        blocks = triton.cdiv(tokens if row_T is None else tokens + 1, TOKENS)
        parts = logits_TE.new_empty(blocks + num_rows - 1, columns * COLUMNS)
        starts = None if row_T is None else torch.empty(num_rows + 1, dtype=torch.int32, device=row_T.device)
        _sums_kernel[(blocks,)](
            logits=logits_TE.contiguous(),
            ids=contiguous(ids_TK),
            present=contiguous(mask_T),
            row_of=row_T,
            parts=parts,
            starts=starts,
            tokens=tokens,
            num_experts=experts,
            row_tokens=row_tokens,
            rows=num_rows,
            width=parts.shape[1],
            z_coeff=z_coeff or 0.0,
            SCORE=choice.score,
            SHARES=has_shares,
            Z=has_z,
            K=choice.k,
            KP=triton.next_power_of_2(choice.k),
            E=tile,
            TOKENS=TOKENS,
            N=min(TOKENS, together(tile)),
            COMPILED=is_compiled(),
        )
        _add_up_kernel[(num_rows, columns)](
            parts=parts,
            starts=starts,
            sums=sums,
            row_tokens=row_tokens,
            rows=num_rows,
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
        # One row needs no sum, and so no launch.
        z = z_R.view(()) if num_rows == 1 else z_R.sum()
    if not has_shares:
        return None, None, z
    return mass.view(num_rows, experts), seen.view(num_rows, experts + 1), z


def token_sums_backward(
    logits_TE: Tensor,
    score: str,
    mask_T: Tensor | None,
    rows: Rows | None,
    z_coeff: float | None,
    grad_RE: Tensor | None,
    grad_z: Tensor | None,
) -> Tensor:
    """Gradient of the logits, given those of ``mass_RE`` and of the z-loss."""
    tokens, experts = logits_TE.shape
    logits_TE = logits_TE.contiguous()
    grad_logits_TE = torch.empty_like(logits_TE)
    width = triton.next_power_of_2(experts)
    row_T, row_tokens = _rows_of(rows, tokens)
    if tokens:
        tokens_of_program = together(width)
        _sums_backward_kernel[(triton.cdiv(tokens, tokens_of_program),)](
            logits=logits_TE,
            present=contiguous(mask_T),
            row_of=row_T,
            grad_mass=contiguous(grad_RE),
            grad_z=grad_z,
            grad_logits=grad_logits_TE,
            tokens=tokens,
            num_experts=experts,
            row_tokens=row_tokens,
            z_coeff=z_coeff or 0.0,
            SCORE=score,
            E=width,
            N=tokens_of_program,
            COMPILED=is_compiled(),
        )
    return grad_logits_TE


def _rows_of(rows: Rows | None, tokens: int) -> tuple[Tensor | None, int]:
    """Row of each token and 0, or None and how many tokens each row has."""
    if rows is None or rows.row_T is None:
        count = 1 if rows is None else rows.count
        row_tokens = tokens // max(1, count)
        assert tokens == count * row_tokens, "rows have equally many tokens"
        return None, row_tokens
    assert len(rows.row_T) == tokens, "each token has a row"
    return rows.row_T.contiguous(), 0


def switch_loss(mass_RE: Tensor, seen_RX: Tensor, coeff: float) -> Tensor:
    """Implement ``moefw_kernels.routing.switch_loss`` for fp32; ``coeff`` is already multiplied by E / K."""
    loss = mass_RE.new_empty(())
    rows = len(seen_RX)
    experts = seen_RX.shape[1] - 1
    width, tile_rows = _tile(rows, experts)
    _switch_kernel[(1,)](
        mass=mass_RE.contiguous(),
        seen=seen_RX.contiguous(),
        loss=loss,
        rows=rows,
        num_experts=experts,
        coeff=coeff,
        E=width,
        N=tile_rows,
    )
    return loss


def switch_loss_backward(seen_RX: Tensor, grad: Tensor, coeff: float) -> Tensor:
    """Gradient of ``mass_RE``, given that of the loss."""
    rows = len(seen_RX)
    experts = seen_RX.shape[1] - 1
    width, tile_rows = _tile(rows, experts)
    grad_RE = seen_RX.new_empty(rows, experts)
    if rows:
        _switch_backward_kernel[(triton.cdiv(rows, tile_rows),)](
            seen=seen_RX.contiguous(),
            grad=grad,
            grad_mass=grad_RE,
            rows=rows,
            num_experts=experts,
            coeff=coeff,
            E=width,
            N=tile_rows,
        )
    return grad_RE


def _tile(rows: int, experts: int) -> tuple[int, int]:
    """Width of a tile and the number of its rows, both powers of two."""
    width = triton.next_power_of_2(experts)
    return width, min(triton.next_power_of_2(max(1, rows)), ROWS_TOGETHER * together(width))
