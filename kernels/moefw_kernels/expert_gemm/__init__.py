"""Products of experts in bf16 with the activation in their epilogues; on a GPU Triton kernels. See README.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.expert_gemm import reference
from moefw_kernels.expert_gemm.row_tiles import NUMBERS, ROWS, most_tiles
from moefw_kernels.expert_gemm.tiles import CANDIDATES, UNTUNED, Tile, Tiles
from moefw_kernels.swiglu import Clamp

__all__ = [
    "CANDIDATES",
    "NUMBERS",
    "ROWS",
    "UNTUNED",
    "Tile",
    "Tiles",
    "gated",
    "gated_backward",
    "most_tiles",
    "product",
    "row_tiles",
]

MULTIPLE = 8
"""Of what sizes of weights are multiples: a descriptor of TMA wants rows that begin on 16 bytes."""


def row_tiles(ends_e: Tensor, num_rows: int) -> Tensor:
    """The list of tiles of groups that end at ``ends_e`` (int32), int32 and flat, for the products below.

    ``num_rows``: the rows of the products' operand; some may lie behind the last group. The host reads nothing.
    """
    tiles: Tensor = torch.ops.moefw.row_tiles(ends_e, num_rows)
    return tiles


def gated(
    x_RD: Tensor,
    gate_up_eHD: Tensor,
    bias_eH: Tensor | None,
    weights_R: Tensor,
    ends_e: Tensor,
    tiles: Tensor,
    *,
    clamp: Clamp | None = None,
    tile: Tile = UNTUNED.gated,
) -> tuple[Tensor, Tensor]:
    """Pre-activation ``(R, H)``, H = 2F, gate then up, and weighted activation ``(R, F)``, both in bf16.

    ``x_RD`` and ``gate_up_eHD`` are bf16; the bias, in any dtype, is added in fp32; ``weights_R`` is fp32 and
    multiplies the activation, ``clamp`` is that of :func:`moefw_kernels.swiglu.weighted_swiglu`. Rows behind the last
    group are not read, and in the results they are undefined. ``tile`` is one of ``CANDIDATES``, and changes no result
    but by the order of its sums. It is the operator ``moefw::gated``.

    Raises:
        ValueError: An operand is not bf16, or D or F is no multiple of 8.
    """
    _check("gated", x_RD, gate_up_eHD)
    h_RH, a_RF = torch.ops.moefw.gated(x_RD, gate_up_eHD, bias_eH, weights_R, ends_e, tiles, clamp, tile)
    return h_RH, a_RF


def product(
    x_RI: Tensor,
    weight: Tensor,
    ends_e: Tensor,
    tiles: Tensor,
    *,
    transposed: bool,
    bias_eO: Tensor | None = None,
    weights_R: Tensor | None = None,
    tile: Tile = UNTUNED.down,
) -> Tensor:
    """``(R, O)`` in bf16: rows times weights (e, I, O), or (e, O, I) if ``transposed``, plus ``weights_R * bias_eO``.

    Dtypes, rows behind the last group, and errors are those of :func:`gated`. A bias needs weights. It is the operator
    ``moefw::grouped_product``.
    """
    _check("product", x_RI, weight)
    out_RO: Tensor = torch.ops.moefw.grouped_product(x_RI, weight, bias_eO, weights_R, ends_e, tiles, transposed, tile)
    return out_RO


def gated_backward(
    grad_RD: Tensor,
    down_eDF: Tensor,
    bias_eD: Tensor | None,
    h_RH: Tensor,
    weights_R: Tensor,
    ends_e: Tensor,
    tiles: Tensor,
    *,
    clamp: Clamp | None = None,
    tile: Tile = UNTUNED.gated_backward,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h_RH`` (bf16) and ``weights_R`` (fp32), and the weighted activation, computed again.

    ``grad_RD`` is that of ``product(a, down, transposed=True, bias_eO=bias, weights_R=weights)``, where ``h`` and ``a``
    are those of :func:`gated`, whose dtypes, rows behind the last group, and errors these are. It is the operator
    ``moefw::gated_backward``.
    """
    _check("gated_backward", grad_RD, down_eDF)
    results = torch.ops.moefw.gated_backward(grad_RD, down_eDF, bias_eD, h_RH, weights_R, ends_e, tiles, clamp, tile)
    grad_RH, grad_weights_R, a_RF = results
    return grad_RH, grad_weights_R, a_RF


def _check(name: str, rows: Tensor, weight: Tensor) -> None:
    sizes = tuple(weight.shape[1:])
    if {rows.dtype, weight.dtype} != {torch.bfloat16} or any(size % MULTIPLE for size in sizes):
        raise ValueError(
            f"{name} got rows in {rows.dtype} and weights in {weight.dtype} of {sizes}: "
            f"give both in torch.bfloat16, and sizes that are multiples of {MULTIPLE}"
        )


def _run(name: str, operand: Tensor, *args: Any, tile: Sequence[int]) -> Any:
    """Result of the kernel of that name, or of the reference where kernels do not run."""
    if not takes_kernels(operand):
        return getattr(reference, name)(operand, *args)
    from moefw_kernels.expert_gemm import triton

    return getattr(triton, name)(operand, *args, Tile(*tile))


def _row_tiles(ends_e: Tensor, num_rows: int) -> Tensor:
    if not takes_kernels(ends_e):
        return reference.row_tiles(ends_e, num_rows)
    from moefw_kernels.expert_gemm import triton

    return triton.row_tiles(ends_e, num_rows)


def _gated(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, clamp, tile = args
    h_RH, a_RF = _run("gated", *tensors, _pair(clamp), tile=tile)
    return h_RH, a_RF


def _product(*args: Any) -> Tensor:
    *others, tile = args
    out_RO: Tensor = _run("product", *others, tile=tile)
    return out_RO


def _gated_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, clamp, tile = args
    grad_RH, grad_weights_R, a_RF = _run("gated_backward", *tensors, _pair(clamp), tile=tile)
    return grad_RH, grad_weights_R, a_RF


def _pair(clamp: Sequence[float] | None) -> Clamp | None:
    return None if clamp is None else (clamp[0], clamp[1])


def _shape_of_row_tiles(ends_e: Tensor, num_rows: int) -> Tensor:
    return ends_e.new_empty(NUMBERS * (1 + most_tiles(num_rows, len(ends_e))))


def _shapes_of_gated(x_RD: Tensor, gate_up_eHD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    h = gate_up_eHD.shape[1]
    return x_RD.new_empty(len(x_RD), h), x_RD.new_empty(len(x_RD), h // 2)


def _shape_of_product(x_RI: Tensor, weight: Tensor, *others: Any) -> Tensor:
    *_, transposed, _ = others
    return x_RI.new_empty(len(x_RI), weight.shape[1 if transposed else 2])


def _shapes_of_gated_backward(
    grad_RD: Tensor, down_eDF: Tensor, bias_eD: Tensor | None, h_RH: Tensor, weights_R: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    a_RF = h_RH.new_empty(len(h_RH), down_eDF.shape[2])
    return h_RH.new_empty(h_RH.shape), weights_R.new_empty(len(h_RH), dtype=torch.float32), a_RF


_ARGUMENTS = "Tensor weights, Tensor ends, Tensor tiles, float[]? clamp, int[] tile"
_OPERATORS = torch.library.Library("moefw", "FRAGMENT")
_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "row_tiles(Tensor ends, SymInt num_rows) -> Tensor": (_row_tiles, _shape_of_row_tiles),
    f"gated(Tensor x, Tensor gate_up, Tensor? bias, {_ARGUMENTS}) -> (Tensor, Tensor)": (_gated, _shapes_of_gated),
    "grouped_product(Tensor x, Tensor weight, Tensor? bias, Tensor? weights, Tensor ends, Tensor tiles, "
    "bool transposed, int[] tile) -> Tensor": (_product, _shape_of_product),
    f"gated_backward(Tensor grad, Tensor down, Tensor? bias, Tensor h, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)": (
        _gated_backward,
        _shapes_of_gated_backward,
    ),
}
for _schema, (_compute, _shapes) in _IMPLEMENTATIONS.items():
    _name = _OPERATORS.define(_schema).split("::")[-1]
    _OPERATORS.impl(_name, _compute, "CompositeExplicitAutograd")
    _OPERATORS.impl(_name, _shapes, "Meta")
