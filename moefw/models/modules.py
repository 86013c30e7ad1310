"""The small modules of a transformer: linear, norm, RoPE, SwiGLU. They compute in the recipe's precision."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.contracts import Precision
from moefw_kernels.rmsnorm import rms_norm


@final
class Linear(nn.Module):
    """``y = x W^T``; weight ``(out_dim, in_dim)`` in fp32, operands from the precision recipe."""

    def __init__(self, in_dim: int, out_dim: int, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(..., out_dim)``."""
        operand = self.precision.quantize(x, role="input", during="fprop")
        return F.linear(operand, self.precision.quantize(self.weight, role="weight", during="fprop"))


@final
class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, the mean in fp32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over its last dimension, in its dtype."""
        return rms_norm(x, self.weight, self.eps)


@final
class SwiGLU(nn.Module):
    """``W2 (silu(W1 x) * (W3 x))``: a dense MLP or a shared expert."""

    def __init__(self, dim: int, hidden_dim: int, precision: Precision) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, hidden_dim, precision)
        self.up_proj = Linear(dim, hidden_dim, precision)
        self.down_proj = Linear(hidden_dim, dim, precision)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped like ``x``."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rope_table(seq_len: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``(S, head_dim/2)`` in fp32 (arXiv 2104.09864 eq. 15)."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), theta ** (-pairs / head_dim))
    return angles.cos(), angles.sin()


def apply_rope(x_BSHd: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + head_dim/2) by its position's angle."""
    cos, sin = (part.to(x_BSHd.dtype).unsqueeze(1) for part in table)
    first, second = x_BSHd.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
