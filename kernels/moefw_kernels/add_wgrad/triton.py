"""Weight gradients of groups as a Triton kernel: a program sums one tile in fp32 registers and adds it once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILES = [(128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (64, 256, 64, 8, 3), (64, 128, 64, 4, 4)]
"""Rows and columns of an output tile, rows of a group at a time, warps, load stages."""


def _tuned(kernel):
    """Kernel, autotuned over tiles for its sizes. The interpreter has no clock and takes the first tile.

    A trial must not add to the gradients: they are restored after each.
    """
    tiles = _TILES[:1] if triton.knobs.runtime.interpret else _TILES
    configs = [
        triton.Config({"BM": m, "BN": n, "BK": k}, num_warps=warps, num_stages=stages)
        for m, n, k, warps, stages in tiles
    ]
    return triton.autotune(configs, key=["M", "N", "FRESH"], restore_value=["main"])(kernel)


@triton.jit
def _kernel(
    main, grad, x, ends, M, N, grad_row, x_row,
    FRESH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add the product (K, M)^T (K, N) over the K rows of each group to ``main`` (groups, M, N), one tile a program.

    ``grad_row`` and ``x_row`` are row strides. FRESH: write, and do not read ``main``.
    """
    across = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * across
    group = tl.program_id(0) // tiles
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    # A group without rows adds nothing; a fresh gradient still has to be written, as zeros.
    if FRESH or stop > start:
        m = tl.program_id(0) % tiles // across * BM + tl.arange(0, BM)
        n = tl.program_id(0) % across * BN + tl.arange(0, BN)
        k = start.to(tl.int64) + tl.arange(0, BK)
        at_grad = grad + k[:, None] * grad_row + m[None, :]
        at_x = x + k[:, None] * x_row + n[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for first in range(start, stop, BK):
            inside = (first + tl.arange(0, BK) < stop)[:, None]
            grads = tl.load(at_grad, mask=inside & (m < M)[None, :], other=0.0)
            rows = tl.load(at_x, mask=inside & (n < N)[None, :], other=0.0)
            acc = tl.dot(tl.trans(grads), rows, acc)
            at_grad += BK * grad_row
            at_x += BK * x_row
        at = main + (group.to(tl.int64) * M + m)[:, None] * N + n[None, :]
        valid = (m < M)[:, None] & (n < N)[None, :]
        if not FRESH:
            acc += tl.load(at, mask=valid, other=0.0).to(tl.float32)
        tl.store(at, acc.to(main.dtype.element_ty), mask=valid)


_add = _tuned(_kernel)


def add_wgrad(main: Tensor, grad_RO: Tensor, x_RI: Tensor, ends_e: Tensor | None, fresh: bool) -> None:
    """Implement ``reference.add_wgrad``, with products summed in fp32."""
    if ends_e is None:
        ends_e = torch.full((1,), len(x_RI), dtype=torch.int32, device=x_RI.device)
    groups = len(ends_e)
    m, n = main.shape[-2:]
    grad_RO, x_RI = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (grad_RO, x_RI))

    def grid(tile):
        return (groups * triton.cdiv(m, tile["BM"]) * triton.cdiv(n, tile["BN"]),)

    if main.numel():
        _add[grid](
            main=main,
            grad=grad_RO,
            x=x_RI,
            ends=ends_e,
            M=m,
            N=n,
            grad_row=grad_RO.stride(0),
            x_row=x_RI.stride(0),
            FRESH=fresh,
        )
