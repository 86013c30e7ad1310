"""The reference; on a CPU one block of rows after the other, so that what it allocates stays in the caches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from moefw_kernels.devices import runs_ahead
from moefw_kernels.swiglu import reference
from moefw_kernels.swiglu.reference import Clamp

aten = torch.ops.aten
ELEMENTS: Final = 262144
"""Elements of a block of the activation."""


def weighted_swiglu(h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None) -> Tensor:
    """Implement ``reference.weighted_swiglu``, bit for bit where rows are contiguous."""
    a_RF = h_RH.new_empty(len(h_RH), h_RH.shape[1] // 2)
    for rows in _blocks(a_RF):
        if clamp is not None:
            a_RF[rows] = reference.weighted_swiglu(h_RH[rows], weights_R[rows], clamp)
            continue
        gate, up = h_RH[rows].chunk(2, dim=-1)
        a = aten.silu.out(gate, out=a_RF[rows]).mul_(up)
        torch.mul(a, weights_R[rows].unsqueeze(-1), out=a)
    return a_RF


def weighted_swiglu_backward(
    grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``reference.weighted_swiglu_backward``, bit for bit where rows are contiguous."""
    grad_h = h_RH.new_empty(h_RH.shape)
    a_RF = h_RH.new_empty(grad_RF.shape)
    grad_weights = h_RH.new_empty(len(h_RH), dtype=torch.float32)
    backward = _backward if clamp is None else partial(_clamped_backward, clamp)
    for rows in _blocks(a_RF):
        backward(grad_RF[rows], h_RH[rows], weights_R[rows], grad_h[rows], grad_weights[rows], a_RF[rows])
    return grad_h, grad_weights, a_RF


def _backward(grad: Tensor, h: Tensor, weights: Tensor, grad_h: Tensor, grad_weights: Tensor, a: Tensor) -> None:
    """Write the results of a block to ``grad_h``, ``grad_weights`` and ``a``.

    ``a`` is also the workspace: at first the activated gate, then the activation without weights.
    """
    gate, up = h.chunk(2, -1)
    grad_gate, grad_up = grad_h.chunk(2, -1)
    weights = weights.unsqueeze(-1)
    wide = torch.promote_types(a.dtype, weights.dtype)
    grad = grad.to(wide)
    weighted = grad * weights
    aten.silu.out(gate, out=a)  # silu(g)
    torch.mul(weighted, a, out=grad_up)
    unweighted = a.mul_(up).to(wide)  # silu(g) * u
    torch.linalg.vecdot(grad.float(), unweighted.float(), out=grad_weights)
    torch.mul(unweighted, weights, out=a)
    aten.silu_backward.grad_input(weighted.mul_(up), gate.to(weighted.dtype), grad_input=grad_gate)


def _clamped_backward(
    clamp: Clamp, grad: Tensor, h: Tensor, weights: Tensor, grad_h: Tensor, grad_weights: Tensor, a: Tensor
) -> None:
    results = reference.weighted_swiglu_backward(grad, h, weights, clamp)
    for to, result in zip((grad_h, grad_weights, a), results, strict=True):
        to.copy_(result)


def _blocks(a_RF: Tensor) -> Iterator[slice]:
    """Rows of each block: on a CPU as many as have ``ELEMENTS`` elements, elsewhere all rows."""
    rows, columns = a_RF.shape
    rows_of_block = rows if runs_ahead(a_RF.device) else ELEMENTS // max(1, columns)
    rows_of_block = max(1, rows_of_block)
    return (slice(first, first + rows_of_block) for first in range(0, rows, rows_of_block))
