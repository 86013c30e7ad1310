"""Sinks: a learned score of each head takes a share of the softmax and has no value (gpt-oss, arXiv 2508.10925)."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out_BHSe: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of an attention with sinks, given those without.

    The output is scaled in place, but not for a compiler: in that of torch 2.11, the gradient of a Function's output is
    zero if two operations in its forward return that tensor.
    """
    whole_BHS = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype).unsqueeze(-1))
    share_BHSe = (lse_BHS - whole_BHS).exp_().unsqueeze(-1)
    if not torch.compiler.is_compiling():
        return out_BHSe.mul_(share_BHSe), whole_BHS
    scaled_BHSe = out_BHSe * share_BHSe
    return scaled_BHSe if scaled_BHSe.dtype is out_BHSe.dtype else scaled_BHSe.to(out_BHSe.dtype), whole_BHS


def sink_gradient(grad_BHSe: Tensor, out_BHSe: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks; output and log-sum-exp are those with sinks."""
    weights_BHS = (sinks_H.unsqueeze(-1) - lse_BHS).exp_()
    along_BHS = (grad_BHSe.to(lse_BHS.dtype) * out_BHSe).sum(-1)
    return -(weights_BHS * along_BHS).sum((0, 2)).to(sinks_H.dtype)
