"""Sinks: a learned score of each head takes a share of the softmax and has no value (gpt-oss, arXiv 2508.10925)."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out_BHSe: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Output and the log-sum-exp of an attention with sinks, given those without.

    The output is scaled in place, but not for a compiler: in that of torch 2.11, the gradient of a Function's output is
    zero if two operations in its forward return that tensor.
    """
    lse_with_sinks_BHS = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype).unsqueeze(-1))
    share_of_keys_BHS1 = (lse_BHS - lse_with_sinks_BHS).exp_().unsqueeze(-1)
    if not torch.compiler.is_compiling():
        return out_BHSe.mul_(share_of_keys_BHS1), lse_with_sinks_BHS
    scaled_BHSe = out_BHSe * share_of_keys_BHS1
    if scaled_BHSe.dtype is not out_BHSe.dtype:
        scaled_BHSe = scaled_BHSe.to(out_BHSe.dtype)
    return scaled_BHSe, lse_with_sinks_BHS


def sink_gradient(grad_BHSe: Tensor, out_BHSe: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks; output and log-sum-exp are those with sinks.

    That of a score is its weight times (gradient of its weight - the output's gradient along the output), and the
    weight of a sink has no gradient: its value is zero.
    """
    weights_BHS = (sinks_H.unsqueeze(-1) - lse_BHS).exp_()
    along_BHS = (grad_BHSe.to(lse_BHS.dtype) * out_BHSe).sum(-1)
    return -(weights_BHS * along_BHS).sum((0, 2)).to(sinks_H.dtype)
