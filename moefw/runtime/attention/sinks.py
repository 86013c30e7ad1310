"""Sinks: a learned score of each head takes a share of the softmax and has no value (gpt-oss, arXiv 2508.10925)."""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out_BHSe: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Scale ``out_BHSe``, the attention without sinks, in place. Return the log-sum-exp with them."""
    whole_BHS = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype).unsqueeze(-1))
    out_BHSe.mul_((lse_BHS - whole_BHS).exp_().unsqueeze(-1))
    return whole_BHS


def sink_gradient(grad_BHSe: Tensor, out_BHSe: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks; output and log-sum-exp are those with sinks."""
    weights_BHS = (sinks_H.unsqueeze(-1) - lse_BHS).exp_()
    along_BHS = (grad_BHSe.to(lse_BHS.dtype) * out_BHSe).sum(-1)
    return -(weights_BHS * along_BHS).sum((0, 2)).to(sinks_H.dtype)
