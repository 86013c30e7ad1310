"""Muon's rule: the momentum of a matrix, with all of its singular values brought near 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, final

import torch
from attrs import frozen
from torch import Tensor

from moefw.core.contracts import MatrixRule

if TYPE_CHECKING:
    from moefw.core.records import ParameterFacts

MOMENTUM: Final = "momentum_buffer"


@final
@frozen(kw_only=True)
class Orthogonalized(MatrixRule):
    """Momentum, Newton-Schulz iterations and decay. Options are those of the plugin; ``roles`` are those it takes."""

    roles: tuple[str, ...]
    momentum: float
    nesterov: bool
    weight_decay: float
    adjust_lr: Literal["original", "match_rms_adamw"]
    dtype: torch.dtype
    steps: int
    coefficients: tuple[float, ...]
    eps: float
    bucket_bytes: int

    def takes(self, facts: ParameterFacts) -> bool:
        """Whether a parameter is of matrices: of products, or also of routers."""
        return facts.role in self.roles and all(len(shape) == 2 for shape in facts.tensors.values())

    def states(self) -> tuple[str, ...]:
        """Name of the momentum."""
        return (MOMENTUM,)

    def direction(self, grad: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """Momentum, or its mean with the gradient."""
        momentum = states[MOMENTUM]
        momentum.lerp_(grad, 1 - self.momentum)
        return grad.lerp(momentum, self.momentum) if self.nesterov else momentum

    def update(self, matrices_Bnm: Tensor) -> Tensor:
        """Matrices with the singular vectors of those given, and all singular values near 1."""
        orthogonal = orthogonalized(
            matrices_Bnm, dtype=self.dtype, steps=self.steps, coefficients=self.coefficients, eps=self.eps
        )
        return orthogonal.float()

    def apply(self, parameter: Tensor, update: Tensor, *, lr: float, shape: tuple[int, int]) -> None:
        """Take the decay off, then step against the update."""
        parameter.mul_(1 - lr * self.weight_decay)
        parameter.add_(update, alpha=-lr * self._factor(shape))

    def _factor(self, shape: tuple[int, int]) -> float:
        """Factor of the learning rate for a matrix of a shape."""
        rows, columns = shape
        if self.adjust_lr == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonalized(
    matrices_Bnm: Tensor, *, dtype: torch.dtype, steps: int, coefficients: tuple[float, ...], eps: float
) -> Tensor:
    """Matrices ``(B, n, m)`` in ``dtype`` after so many iterations of Newton-Schulz (arXiv 2502.16982, section 2.1).

    An iteration is ``a X + (b A + c A A) X`` with ``A = X X^T``, of the wide form of each matrix. One alone goes
    through the operators of ``torch.optim.Muon`` and gets its bits.
    """
    a, b, c = coefficients
    is_alone = len(matrices_Bnm) == 1
    multiply_add = torch.addmm if is_alone else torch.baddbmm
    x = (matrices_Bnm[0] if is_alone else matrices_Bnm).to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    # The Frobenius norm is no smaller than the largest singular value, so that all of them are at most 1.
    norm = x.norm() if is_alone else torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norm.clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    if is_tall:
        x = x.mT
    return x.unsqueeze(0) if is_alone else x
