"""QuACK's products as operators, with shapes for tensors without memory, on which ``moefw plan`` runs a layer.

Shapes: legend in :mod:`moefw.core.stages`; ``H = 2F``; ``I`` and ``O``, inputs and outputs of a product. Gate and up
take turns in the columns of H, as QuACK's kernels pair them; in weights, the rows of gate lie before those of up, and
``concat_layout`` names the operand in which they do. Group ``i`` are the rows from ``cu_seqlens[i]`` on, up to
``cu_seqlens[i + 1]``, int32 on the device. Other rows are not read; in results they are undefined.

QuACK measures its variants (``tuned``) for each new shape, and ragged rows have another at every step. So it does not.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
from torch import Tensor


def gated(x_RD: Tensor, gate_up_eHD: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Pre-activation ``(R, H)`` and activation ``(R, F)``, in the dtype of ``x``."""
    h_RH, a_RF = torch.ops.moefw_quack.gated(x_RD, gate_up_eHD, cu_seqlens)
    return h_RH, a_RF


def product(x_RI: Tensor, weight_eIO: Tensor, cu_seqlens: Tensor, *, in_turn: bool = False) -> Tensor:
    """``(R, O)``, in the dtype of ``x``. ``in_turn``: gate and up take turns in the columns of ``x``."""
    out_RO: Tensor = torch.ops.moefw_quack.product(x_RI, weight_eIO, cu_seqlens, in_turn)
    return out_RO


def dgated(
    grad_RD: Tensor, down_eDF: Tensor, h_RH: Tensor, weights_R: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of H, the activation times the rows' weights ``(R, F)``, and the gradient of these weights, fp32."""
    grad_RH, a_RF, grad_R = torch.ops.moefw_quack.dgated(grad_RD, down_eDF, h_RH, weights_R, cu_seqlens)
    return grad_RH, a_RF, grad_R


def wgrad(main_eOI: Tensor, grad_RO: Tensor, x_RI: Tensor, cu_seqlens: Tensor, *, in_turn: bool, fresh: bool) -> None:
    """Add ``grad^T x`` of each group to ``main``, fp32 or bf16, in place, or write it if ``fresh``.

    ``in_turn``: gate and up take turns in the columns of ``grad``. A group without rows adds nothing.
    """
    torch.ops.moefw_quack.wgrad(main_eOI, grad_RO, x_RI, cu_seqlens, in_turn, fresh)


def _quack() -> Any:
    """QuACK's interface. The first call imports it, which takes seconds."""
    return importlib.import_module("quack.gemm_interface")


def _gated(x_RD: Tensor, gate_up_eHD: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    h_RH, a_RF = _quack().gemm_gated(
        x_RD, gate_up_eHD.mT, activation="swiglu", cu_seqlens_m=cu_seqlens, concat_layout=("B",), tuned=False
    )
    return h_RH, a_RF


def _product(x_RI: Tensor, weight_eIO: Tensor, cu_seqlens: Tensor, in_turn: bool) -> Tensor:
    concat_layout = ("B",) if in_turn else None
    out_RO: Tensor = _quack().gemm(x_RI, weight_eIO, cu_seqlens_m=cu_seqlens, concat_layout=concat_layout, tuned=False)
    return out_RO


def _dgated(
    grad_RD: Tensor, down_eDF: Tensor, h_RH: Tensor, weights_R: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_RH, a_RF, grad_R = _quack().gemm_dgated(
        grad_RD,
        down_eDF,
        h_RH,
        activation="swiglu",
        colvec_scale=weights_R,
        colvec_reduce=True,
        cu_seqlens_m=cu_seqlens,
        tuned=False,
    )
    return grad_RH, a_RF, grad_R


def _wgrad(main_eOI: Tensor, grad_RO: Tensor, x_RI: Tensor, cu_seqlens: Tensor, in_turn: bool, fresh: bool) -> None:
    if fresh:
        concat_layout = ("out",) if in_turn else None
        _quack().gemm(grad_RO.mT, x_RI, out=main_eOI, cu_seqlens_k=cu_seqlens, concat_layout=concat_layout, tuned=False)
        return
    concat_layout_of_sum = ("C", "out") if in_turn else None
    _quack().gemm_add_inplace(
        grad_RO.mT, x_RI, main_eOI, cu_seqlens_k=cu_seqlens, concat_layout=concat_layout_of_sum, tuned=False
    )


def _shapes_of_gated(x_RD: Tensor, gate_up_eHD: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    h = gate_up_eHD.shape[1]
    return x_RD.new_empty(len(x_RD), h), x_RD.new_empty(len(x_RD), h // 2)


def _shape_of_product(x_RI: Tensor, weight_eIO: Tensor, cu_seqlens: Tensor, in_turn: bool) -> Tensor:
    return x_RI.new_empty(len(x_RI), weight_eIO.shape[-1])


def _shapes_of_dgated(
    grad_RD: Tensor, down_eDF: Tensor, h_RH: Tensor, weights_R: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    activation_RF = h_RH.new_empty(len(h_RH), down_eDF.shape[-1])
    return torch.empty_like(h_RH), activation_RF, torch.empty_like(weights_R)


_OPERATORS: Final = torch.library.Library("moefw_quack", "FRAGMENT")
_OPERATORS.define("gated(Tensor x, Tensor gate_up, Tensor cu_seqlens) -> (Tensor, Tensor)")
_OPERATORS.define("product(Tensor x, Tensor weight, Tensor cu_seqlens, bool in_turn) -> Tensor")
_OPERATORS.define(
    "dgated(Tensor grad, Tensor down, Tensor h, Tensor weights, Tensor cu_seqlens) -> (Tensor, Tensor, Tensor)"
)
_OPERATORS.define("wgrad(Tensor(a!) main, Tensor grad, Tensor x, Tensor cu_seqlens, bool in_turn, bool fresh) -> ()")
for _name, _run, _shape in (
    ("gated", _gated, _shapes_of_gated),
    ("product", _product, _shape_of_product),
    ("dgated", _dgated, _shapes_of_dgated),
    ("wgrad", _wgrad, lambda *_: None),
):
    _OPERATORS.impl(_name, _run, "CompositeExplicitAutograd")
    _OPERATORS.impl(_name, _shape, "Meta")
