"""Auxiliary losses, attached where they are computed, so that they work on every pipeline stage and under recompute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefw.runtime.forward_context import forward_context


def attach(weights_TK: Tensor, loss: Tensor) -> Tensor:
    """``weights_TK`` with ``loss`` attached: in backward, ``loss`` gets a gradient of 1.

    Where the context of forward collects auxiliary losses, ``loss`` is one more of them, and nothing is attached.
    """
    collected = forward_context().aux_losses
    if collected is not None:
        collected.append(loss)
        return weights_TK
    attached: Tensor = _Attach.apply(weights_TK, loss)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    """Identity of the weights. Saves no tensor."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, Tensor]:
        return grad_TK, torch.ones((), dtype=ctx.loss_dtype, device=grad_TK.device)
