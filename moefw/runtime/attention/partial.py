"""Attention to keys that arrive part by part, from one rank of cp after the other.

A softmax over all keys is the sum of those over each part, weighted by the exponential of their log-sum-exp (ring
attention, arXiv 2310.01889). Backward of a part needs only the output and log-sum-exp over all keys.

Legend, in addition to that of :mod:`moefw.runtime.attention.attend`: ``kv`` is keys and values side by side,
``(B, G, S, d + e)``; ``S`` is the positions of one rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefw.core.contracts import ContextAttention, Layout
from moefw.runtime.attention import kernels
from moefw.runtime.attention.mask import Mask
from moefw.runtime.attention.sinks import sink_gradient, with_sinks
from moefw.runtime.attention.visible import Visible
from moefw.runtime.parallel.sequence_cut import SequenceCut


class PartialAttention(ContextAttention):
    """Attention to the keys and values of one rank of cp after the other. A subclass moves them, and gradients back.

    Saves its inputs, output and log-sum-exp.
    """

    def __init__(self, layout: Layout) -> None:
        self.cut = SequenceCut(layout)

    def __call__(
        self,
        q_BHSd: Tensor,
        k_BGSd: Tensor,
        v_BGSe: Tensor,
        mask: Mask,
        *,
        attend: Callable[..., tuple[Tensor, Tensor]],
        sinks_H: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """``out_BHSe`` of this rank's queries, by the kernels of PyTorch."""
        scale = 1.0 / sqrt(q_BHSd.shape[-1]) if scale is None else scale
        # Autograd sees only tensors that are arguments themselves, so the mask's tensor is one more.
        out_BHSe: Tensor = _Partial.apply(  # type: ignore[no-untyped-call]
            q_BHSd, k_BGSd, v_BGSe, sinks_H, mask.documents_BS, mask, scale, self
        )
        return out_BHSe

    @abstractmethod
    def visit(self, kv: Tensor, see: Callable[[int, Tensor], None]) -> None:
        """Call ``see(rank, kv)`` with the keys and values of every rank of cp, this one first. Collective."""

    @abstractmethod
    def visit_back(self, kv: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call ``gradient(rank, kv)`` likewise. Return the gradients of this rank's ``kv``, summed over all ranks."""


class _Partial(torch.autograd.Function):
    """Moves keys and values once more in backward, so that those of other ranks are not saved."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        documents_BS: Tensor | None,
        mask: Mask,
        scale: float,
        ranks: PartialAttention,
    ) -> Tensor:
        merged = _Merged(q, v.shape[-1], Visible(ranks.cut, mask, q, scale))
        ranks.visit(torch.cat([k, v], -1), merged.add)
        out = merged.out.to(q.dtype)
        lse_BHS = merged.lse_BHS
        if sinks_H is not None:
            out, lse_BHS = with_sinks(out, lse_BHS, sinks_H)
        ctx.save_for_backward(q, k, v, out, lse_BHS, sinks_H, documents_BS)
        ctx.mask = replace(mask, documents_BS=None, valid_BS=None)  # the first is saved above
        ctx.scale = scale
        ctx.ranks = ranks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse_BHS, sinks_H, documents_BS = ctx.saved_tensors
        visible = Visible(ctx.ranks.cut, replace(ctx.mask, documents_BS=documents_BS), q, ctx.scale)
        gradients = _Gradients(grad=grad, q=q, out=out, lse_BHS=lse_BHS, visible=visible, key_width=k.shape[-1])
        grad_kv = ctx.ranks.visit_back(torch.cat([k, v], -1), gradients.of)
        grad_k, grad_v = grad_kv.to(k.dtype).split([k.shape[-1], v.shape[-1]], -1)
        grad_sinks = sink_gradient(grad, out, lse_BHS, sinks_H) if ctx.needs_input_grad[3] else None
        return gradients.grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None, None, None, None


class _Merged:
    """Output and log-sum-exp of the keys so far, at least fp32."""

    def __init__(self, q: Tensor, value_width: int, visible: Visible) -> None:
        self.q = q
        self.visible = visible
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros((*q.shape[:-1], value_width), dtype=dtype)
        self.lse_BHS = q.new_full(q.shape[:-1], -inf, dtype=dtype)

    def add(self, source: int, kv: Tensor) -> None:
        """Add the keys and values of a rank: outputs are averaged with weights ``exp(lse)``."""
        k, v = kv.split([self.q.shape[-1], self.out.shape[-1]], -1)
        for queries, keys, scores, blind_BHS in self.visible.blocks(source):
            block_out, block_lse_BHS = kernels.forward(self.q[:, :, queries], k[:, :, keys], v[:, :, keys], scores)
            if blind_BHS is not None:
                block_lse_BHS = block_lse_BHS.masked_fill(blind_BHS, -inf)
            # Both are views, written in place. This rank's own block comes first and holds each query's own key, so no
            # log-sum-exp is -inf here, whose difference to itself would be no number.
            lse_so_far_BHS = self.lse_BHS[:, :, queries]
            out_so_far = self.out[:, :, queries]
            lse_BHS = torch.logaddexp(lse_so_far_BHS, block_lse_BHS)
            out_so_far.mul_((lse_so_far_BHS - lse_BHS).exp_().unsqueeze(-1))
            out_so_far.add_(block_out * (block_lse_BHS - lse_BHS).exp_().unsqueeze(-1))
            lse_so_far_BHS.copy_(lse_BHS)


class _Gradients:
    """Gradient of the queries so far, at least fp32, and that of the keys of each rank."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse_BHS: Tensor, visible: Visible, key_width: int) -> None:
        self.grad = grad
        self.q = q
        self.out = out
        self.lse_BHS = lse_BHS
        self.visible = visible
        self.key_width = key_width
        self.grad_q = torch.zeros_like(q, dtype=lse_BHS.dtype)

    def of(self, source: int, kv: Tensor) -> Tensor:
        """Return the gradient of a rank's ``kv``, and add its part to the gradient of the queries."""
        k, v = kv.split([self.key_width, kv.shape[-1] - self.key_width], -1)
        grad_kv = torch.zeros_like(kv, dtype=self.lse_BHS.dtype)
        for queries, keys, scores, blind_BHS in self.visible.blocks(source):
            lse_BHS = self.lse_BHS[:, :, queries]
            if blind_BHS is not None:
                lse_BHS = lse_BHS.masked_fill(blind_BHS, inf)  # probabilities exp(score - inf) are 0
            grad_q, grad_k, grad_v = kernels.backward(
                grad_BHSe=self.grad[:, :, queries],
                q_BHSd=self.q[:, :, queries],
                k_BGSd=k[:, :, keys],
                v_BGSe=v[:, :, keys],
                out_BHSe=self.out[:, :, queries],
                lse_BHS=lse_BHS.contiguous(),
                scores=scores,
            )
            self.grad_q[:, :, queries] += grad_q
            grad_kv[:, :, keys] += torch.cat([grad_k, grad_v], -1)
        return grad_kv
