"""The reference, one block of rows after the other, so that what it allocates stays in the caches of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from moefw_kernels.swiglu import reference
from moefw_kernels.swiglu.reference import Clamp

ELEMENTS: Final = 131072
"""Elements of a block of the activation."""


def weighted_swiglu(h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None) -> Tensor:
    """Implement ``reference.weighted_swiglu``, bit for bit."""
    a_RF = h_RH.new_empty(len(h_RH), h_RH.shape[1] // 2)
    for rows in _blocks(a_RF):
        a_RF[rows] = reference.weighted_swiglu(h_RH[rows], weights_R[rows], clamp)
    return a_RF


def weighted_swiglu_backward(
    grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``reference.weighted_swiglu_backward``, bit for bit."""
    grad_h, a_RF = h_RH.new_empty(h_RH.shape), h_RH.new_empty(grad_RF.shape)
    grad_weights = h_RH.new_empty(len(h_RH), dtype=torch.float32)
    for rows in _blocks(a_RF):
        found = reference.weighted_swiglu_backward(grad_RF[rows], h_RH[rows], weights_R[rows], clamp)
        grad_h[rows], grad_weights[rows], a_RF[rows] = found
    return grad_h, grad_weights, a_RF


def _blocks(a_RF: Tensor) -> Iterator[slice]:
    rows, columns = a_RF.shape
    each = max(1, ELEMENTS // max(1, columns))
    return (slice(first, first + each) for first in range(0, rows, each))
