"""Which logits the kernels of routers take."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.routing.gating import Gating

MOST_EXPERTS: Final = 1024
"""The most experts for which the kernel chooses. With more, PyTorch does."""
MOST_CHOICES: Final = 32
"""The most choices of a token for which the kernel chooses."""


def kernels_take(logits_TE: Tensor, gating: Gating) -> bool:
    """Whether the kernels take these logits; a compiler and a subclass need PyTorch operations."""
    if not takes_kernels(logits_TE) or type(logits_TE) is not Tensor or torch.compiler.is_compiling():
        return False
    if logits_TE.dtype is not torch.float32:
        return False
    return logits_TE.shape[1] <= MOST_EXPERTS and gating.k <= MOST_CHOICES
