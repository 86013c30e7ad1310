"""Triton kernels. Grids are persistent: a program computes one output tile after another, columns fastest.

Programs that run at the same time then share a group's weights and its rows in L2. Rows are loaded by pointers, weights
by TMA descriptors, so kernels need compute capability 9.0. An accumulator is added to by one ``tl.dot`` alone: two in a
loop are compiled to wrong code for Blackwell (triton#10821). Epilogues round where ``swiglu`` does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefw_kernels.casts import as_bf16, is_compiled
from moefw_kernels.devices import is_gpu
from moefw_kernels.expert_gemm import MULTIPLE
from moefw_kernels.expert_gemm.row_tiles import NUMBERS, ROWS, most_tiles
from moefw_kernels.expert_gemm.tiles import Tile
from moefw_kernels.swiglu.reference import Clamp
from moefw_kernels.swiglu.triton import backward_of_tile, factors, in_bf16, store_bf16

PROGRAMS_ELSEWHERE: Final = 2
"""Programs of a grid where there is no GPU, in the interpreter: so few that each computes several tiles."""
_UNIT = tl.constexpr(MULTIPLE)
"""Kernels get widths and strides in units of so many values, and so know that accesses of 16 bytes fit."""
_NUMBERS = tl.constexpr(NUMBERS)


@triton.jit
def _row_tiles_kernel(ends, tiles, groups, G: tl.constexpr, BM: tl.constexpr, N: tl.constexpr):
    """Write the tiles of one group in each program, behind those of earlier groups, and the number of all tiles."""
    group = tl.program_id(0)
    g = tl.arange(0, G)
    stops = tl.load(ends + g, mask=g < groups, other=0)
    starts = tl.load(ends + g - 1, mask=(g > 0) & (g < groups), other=0)
    counts = tl.where(g < groups, tl.cdiv(stops - starts, BM), 0)
    before = tl.sum(tl.where(g < group, counts, 0))
    count = tl.sum(tl.where(g == group, counts, 0))
    start = tl.sum(tl.where(g == group, starts, 0))
    stop = tl.sum(tl.where(g == group, stops, 0))
    if group == 0:
        tl.store(tiles, tl.sum(counts))
    for first in range(0, count, N):
        tile = first + tl.arange(0, N)
        at = tiles + _NUMBERS * (1 + before + tile)
        inside = tile < count
        tl.store(at, tl.full((N,), group, tl.int32), mask=inside)
        tl.store(at + 1, start + tile * BM, mask=inside)
        tl.store(at + 2, tl.full((N,), stop, tl.int32), mask=inside)


@triton.jit
def _row_tile(tiles, tile):
    """Group of a tile of rows, its first row, and the end of the group."""
    at = tiles + _NUMBERS * (1 + tile)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _factor(x, COMPILED: tl.constexpr):
    """Factor of a product. The interpreter multiplies the bits of bf16, so it gets the values in fp32."""
    if COMPILED:
        return x
    else:
        return _as_fp32(x)


@triton.jit
def _as_fp32(x):
    """Values in fp32. Those of bf16 are cast by their bits: the interpreter reads subnormal ones wrongly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _columns_of(weights, group, n0, k0, TRANSPOSED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Weights (BK, BN) of a group, 0 outside. ``TRANSPOSED``: a group's matrix is (columns, depth)."""
    if TRANSPOSED:
        return weights.load([group, n0, k0]).reshape(BN, BK).T
    else:
        return weights.load([group, k0, n0]).reshape(BK, BN)


@triton.jit
def _place(tiles, tile, across, BM: tl.constexpr, BN: tl.constexpr):
    """Group of an output tile, its first column, its rows, these without any behind the group's end, and that end."""
    group, first, stop = _row_tile(tiles, tile // across)
    m = first + tl.arange(0, BM)
    return group, tile % across * BN, m, tl.minimum(m, stop - 1).to(tl.int64), stop


@triton.jit
def _multiplied(
    x, x_stride, rows, w, group, n0, K,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Product (BM, BN), fp32, of rows (R, K) and a group's columns: see :func:`_columns_of`."""
    k = tl.arange(0, BK)
    at_x = x + rows[:, None] * (x_stride * _UNIT) + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        x_MK = _factor(tl.load(at_x, mask=(k0 + k < K)[None, :], other=0.0), COMPILED)
        w_KN = _factor(_columns_of(w, group, n0, k0, TRANSPOSED, BN, BK), COMPILED)
        acc = tl.dot(x_MK, w_KN, acc)
        at_x += BK
    return acc


@triton.jit
def _gated_kernel(
    x, gate_up, bias, weights, tiles, h, a, x_stride, D, F,
    BIASED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Multiply rows (R, D) by (groups, 2F, D): gate and up side by side, each in an accumulator of its own."""
    D *= _UNIT
    F *= _UNIT
    across = tl.cdiv(F, BN)
    k = tl.arange(0, BK)
    for tile in range(tl.program_id(0), tl.load(tiles) * across, tl.num_programs(0)):
        group, n0, m, rows, stop = _place(tiles, tile, across, BM, BN)
        at_x = x + rows[:, None] * (x_stride * _UNIT) + k[None, :]
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, D, BK):
            x_MK = _factor(tl.load(at_x, mask=(k0 + k < D)[None, :], other=0.0), COMPILED)
            gate_KN = _factor(_columns_of(gate_up, group, n0, k0, True, BN, BK), COMPILED)
            up_KN = _factor(_columns_of(gate_up, group, F + n0, k0, True, BN, BK), COMPILED)
            gate = tl.dot(x_MK, gate_KN, gate)
            up = tl.dot(x_MK, up_KN, up)
            at_x += BK
        n = n0 + tl.arange(0, BN)
        if BIASED:
            at_bias = bias + group.to(tl.int64) * 2 * F + n
            gate += _as_fp32(tl.load(at_bias, mask=n < F, other=0.0))[None, :]
            up += _as_fp32(tl.load(at_bias + F, mask=n < F, other=0.0))[None, :]
        gate = as_bf16(gate, COMPILED)
        up = as_bf16(up, COMPILED)
        inside = (m < stop)[:, None] & (n < F)[None, :]
        at_h = h + m.to(tl.int64)[:, None] * 2 * F + n[None, :]
        store_bf16(at_h, gate, inside)
        store_bf16(at_h + F, up, inside)
        _, activated, factor = factors(gate, up, LIMIT, ALPHA, COMPILED)
        unweighted = as_bf16(activated * factor, COMPILED)
        weight = tl.load(weights + rows)[:, None]
        store_bf16(a + m.to(tl.int64)[:, None] * F + n[None, :], as_bf16(unweighted * weight, COMPILED), inside)


@triton.jit
def _product_kernel(
    x, w, bias, weights, tiles, out, x_stride, K, N,
    TRANSPOSED: tl.constexpr, BIASED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Multiply rows (R, K) by (groups, K, N), or TRANSPOSED by (groups, N, K). BIASED: add weight times bias."""
    K *= _UNIT
    N *= _UNIT
    across = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.load(tiles) * across, tl.num_programs(0)):
        group, n0, m, rows, stop = _place(tiles, tile, across, BM, BN)
        acc = _multiplied(x, x_stride, rows, w, group, n0, K, TRANSPOSED, BM, BN, BK, COMPILED)
        n = n0 + tl.arange(0, BN)
        if BIASED:
            added = _as_fp32(tl.load(bias + group.to(tl.int64) * N + n, mask=n < N, other=0.0))
            acc += tl.load(weights + rows)[:, None] * added[None, :]
        inside = (m < stop)[:, None] & (n < N)[None, :]
        store_bf16(out + m.to(tl.int64)[:, None] * N + n[None, :], as_bf16(acc, COMPILED), inside)


@triton.jit
def _gated_backward_kernel(
    grad, down, h, weights, tiles, grad_h, a, sums, grad_stride, h_stride, num_rows, D, F,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Multiply gradients (R, D) by (groups, D, F) and go on to those of gate and up.

    ``sums`` (columns of tiles, R): a tile's part of the gradients of the rows' weights.
    """
    D *= _UNIT
    F *= _UNIT
    across = tl.cdiv(F, BN)
    for tile in range(tl.program_id(0), tl.load(tiles) * across, tl.num_programs(0)):
        group, n0, m, rows, stop = _place(tiles, tile, across, BM, BN)
        acc = _multiplied(grad, grad_stride, rows, down, group, n0, D, False, BM, BN, BK, COMPILED)
        # Half of the columns at a time: values of all of them would not fit in registers.
        left, right = tl.split(acc.reshape(BM, 2, BN // 2).permute(0, 2, 1))
        args = h, weights, grad_h, a, h_stride, m, rows, stop
        total = _gated_backward_of_half(left, *args, n0, F, LIMIT, ALPHA, BN // 2, COMPILED)
        total += _gated_backward_of_half(right, *args, n0 + BN // 2, F, LIMIT, ALPHA, BN // 2, COMPILED)
        tl.store(sums + tl.cast(tile % across, tl.int64) * num_rows + m, total, mask=m < stop)


@triton.jit
def _gated_backward_of_half(
    acc, h, weights, grad_h, a, h_stride, m, rows, stop, n0, F,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Write gradients of gate and up, and the activation, of N columns; return their part of the weights' gradients."""
    n = n0 + tl.arange(0, N)
    columns = (n < F)[None, :]
    inside = (m < stop)[:, None] & columns
    at = h + rows[:, None] * (h_stride * _UNIT) + n[None, :]
    gate = _as_fp32(tl.load(at, mask=columns, other=0.0))
    up = _as_fp32(tl.load(at + F, mask=columns, other=0.0))
    weight = tl.load(weights + rows)[:, None]
    dy = as_bf16(acc, COMPILED)
    grad_gate, grad_up, unweighted = backward_of_tile(dy, gate, up, weight, LIMIT, ALPHA, COMPILED)
    m = m.to(tl.int64)[:, None]
    to = grad_h + m * 2 * F + n[None, :]
    store_bf16(to, grad_gate, inside)
    store_bf16(to + F, grad_up, inside)
    store_bf16(a + m * F + n[None, :], as_bf16(unweighted * weight, COMPILED), inside)
    return tl.sum(dy * unweighted, 1)


@triton.jit
def _weight_gradients_kernel(
    sums, grad, bias, tiles, grad_weights, grad_stride, num_rows, parts, D,
    BIASED: tl.constexpr, BM: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a tile's gradients of weights, always in one order, and those through the bias."""
    D *= _UNIT
    tile = tl.program_id(0)
    if tile >= tl.load(tiles):
        return
    group, first, stop = _row_tile(tiles, tile)
    m = (first + tl.arange(0, BM)).to(tl.int64)
    inside = m < stop
    total = tl.zeros((BM,), tl.float32)
    for part in range(0, parts):
        total += tl.load(sums + tl.cast(part, tl.int64) * num_rows + m, mask=inside, other=0.0)
    if BIASED:
        products = tl.zeros((BM, C), tl.float32)
        for first_column in range(0, D, C):
            c = first_column + tl.arange(0, C)
            added = _as_fp32(tl.load(bias + group.to(tl.int64) * D + c, mask=c < D, other=0.0))
            at = grad + m[:, None] * (grad_stride * _UNIT) + c[None, :]
            products += _as_fp32(tl.load(at, mask=inside[:, None] & (c < D)[None, :], other=0.0)) * added[None, :]
        total += tl.sum(products, 1)
    tl.store(grad_weights + m, total, mask=inside)


def row_tiles(ends_e: Tensor, num_rows: int) -> Tensor:
    """Implement ``reference.row_tiles``. Numbers behind those of the last tile are undefined."""
    groups = len(ends_e)
    tiles = ends_e.new_empty(NUMBERS * (1 + most_tiles(num_rows, groups)))
    _row_tiles_kernel[(groups,)](
        ends=ends_e, tiles=tiles, groups=groups, G=triton.next_power_of_2(groups), BM=ROWS, N=64
    )
    return tiles


def gated(
    x_RD: Tensor,
    gate_up_eHD: Tensor,
    bias_eH: Tensor | None,
    weights_R: Tensor,
    ends_e: Tensor,
    tiles: Tensor,
    clamp: Clamp | None,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    """Implement ``reference.gated`` for bf16, with tiles like ``tile``."""
    x_RD = _along_rows(x_RD)
    num_rows, d = x_RD.shape
    f = gate_up_eHD.shape[1] // 2
    h_RH = x_RD.new_empty(num_rows, 2 * f)
    a_RF = x_RD.new_empty(num_rows, f)
    limit, alpha = in_bf16(clamp)
    if num_rows:
        _gated_kernel[_grid(num_rows, len(ends_e), f, tile, x_RD.device)](
            x=x_RD,
            gate_up=_descriptor(gate_up_eHD, tile.columns, tile.depth),
            bias=_dense(bias_eH),
            weights=_dense(weights_R),
            tiles=tiles,
            h=h_RH,
            a=a_RF,
            x_stride=x_RD.stride(0) // MULTIPLE,
            D=d // MULTIPLE,
            F=f // MULTIPLE,
            BIASED=bias_eH is not None,
            LIMIT=limit,
            ALPHA=alpha,
            **_constants(tile),
        )
    return h_RH, a_RF


def product(
    x_RI: Tensor,
    weight: Tensor,
    bias_eO: Tensor | None,
    weights_R: Tensor | None,
    ends_e: Tensor,
    tiles: Tensor,
    transposed: bool,
    tile: Tile,
) -> Tensor:
    """Implement ``reference.product`` for bf16, with tiles like ``tile``."""
    x_RI = _along_rows(x_RI)
    num_rows, k = x_RI.shape
    n = weight.shape[1] if transposed else weight.shape[2]
    out_RO = x_RI.new_empty(num_rows, n)
    block = (tile.columns, tile.depth) if transposed else (tile.depth, tile.columns)
    if num_rows:
        _product_kernel[_grid(num_rows, len(ends_e), n, tile, x_RI.device)](
            x=x_RI,
            w=_descriptor(weight, *block),
            bias=_dense(bias_eO),
            weights=_dense(weights_R),
            tiles=tiles,
            out=out_RO,
            x_stride=x_RI.stride(0) // MULTIPLE,
            K=k // MULTIPLE,
            N=n // MULTIPLE,
            TRANSPOSED=transposed,
            BIASED=bias_eO is not None,
            **_constants(tile),
        )
    return out_RO


def gated_backward(
    grad_RD: Tensor,
    down_eDF: Tensor,
    bias_eD: Tensor | None,
    h_RH: Tensor,
    weights_R: Tensor,
    ends_e: Tensor,
    tiles: Tensor,
    clamp: Clamp | None,
    tile: Tile,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``reference.gated_backward`` for bf16, with tiles like ``tile``."""
    grad_RD = _along_rows(grad_RD)
    grad_RH, a_RF, sums_PR = _gated_backward(grad_RD, down_eDF, h_RH, weights_R, tiles, clamp, tile)
    return grad_RH, _weight_gradients(sums_PR, grad_RD, bias_eD, len(ends_e), tiles), a_RF


def _gated_backward(
    grad_RD: Tensor,
    down_eDF: Tensor,
    h_RH: Tensor,
    weights_R: Tensor,
    tiles: Tensor,
    clamp: Clamp | None,
    tile: Tile,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of ``h``, the activation, and parts of the weights' gradients, one for each tile's columns."""
    h_RH = _along_rows(h_RH)
    num_rows, d = grad_RD.shape
    groups, _, f = down_eDF.shape
    limit, alpha = in_bf16(clamp)
    grad_RH = h_RH.new_empty(num_rows, 2 * f)
    a_RF = h_RH.new_empty(num_rows, f)
    sums_PR = weights_R.new_empty(triton.cdiv(f, tile.columns), num_rows)
    if num_rows:
        _gated_backward_kernel[_grid(num_rows, groups, f, tile, h_RH.device)](
            grad=grad_RD,
            down=_descriptor(down_eDF, tile.depth, tile.columns),
            h=h_RH,
            weights=_dense(weights_R),
            tiles=tiles,
            grad_h=grad_RH,
            a=a_RF,
            sums=sums_PR,
            grad_stride=grad_RD.stride(0) // MULTIPLE,
            h_stride=h_RH.stride(0) // MULTIPLE,
            num_rows=num_rows,
            D=d // MULTIPLE,
            F=f // MULTIPLE,
            LIMIT=limit,
            ALPHA=alpha,
            **_constants(tile),
        )
    return grad_RH, a_RF, sums_PR


def _weight_gradients(sums_PR: Tensor, grad_RD: Tensor, bias_eD: Tensor | None, groups: int, tiles: Tensor) -> Tensor:
    """Gradients of the rows' weights, ``(R)``."""
    parts, num_rows = sums_PR.shape
    grad_weights_R = sums_PR.new_empty(num_rows)
    if num_rows:
        _weight_gradients_kernel[(most_tiles(num_rows, groups),)](
            sums=sums_PR,
            grad=grad_RD,
            bias=_dense(bias_eD),
            tiles=tiles,
            grad_weights=grad_weights_R,
            grad_stride=grad_RD.stride(0) // MULTIPLE,
            num_rows=num_rows,
            parts=parts,
            D=grad_RD.shape[1] // MULTIPLE,
            BIASED=bias_eD is not None,
            BM=ROWS,
            C=32,
        )
    return grad_weights_R


def _grid(num_rows: int, groups: int, columns: int, tile: Tile, device: torch.device) -> tuple[int]:
    """A program for each multiprocessor, or for each tile if there are fewer. The host knows only the most tiles."""
    programs = PROGRAMS_ELSEWHERE
    if is_gpu(device):
        programs = torch.cuda.get_device_properties(device).multi_processor_count
    return (min(programs, most_tiles(num_rows, groups) * triton.cdiv(columns, tile.columns)),)


def _constants(tile: Tile) -> dict[str, int | bool]:
    return {
        "BM": ROWS,
        "BN": tile.columns,
        "BK": tile.depth,
        "COMPILED": is_compiled(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _descriptor(weight: Tensor, *block: int) -> TensorDescriptor:
    """Descriptor by which TMA loads a block of one group's matrix; what is outside of the matrix is 0."""
    return TensorDescriptor.from_tensor(weight.contiguous(), [1, *block])


def _along_rows(x_RC: Tensor) -> Tensor:
    """``x`` with contiguous rows, a multiple of units apart."""
    in_units = x_RC.stride(1) == 1 and x_RC.stride(0) % MULTIPLE == 0
    return x_RC if in_units else x_RC.contiguous()


def _dense(values: Tensor | None) -> Tensor | None:
    """Values side by side, if there are any."""
    return None if values is None else values.contiguous()
