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
    """Attention to the keys and values of one rank of cp after the other. How they come, and gradients back, is left.

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
        """Return ``out_BHSe`` of this rank's queries, by the kernels of PyTorch."""
        scale = 1.0 / sqrt(q_BHSd.shape[-1]) if scale is None else scale
        given = (q_BHSd, k_BGSd, v_BGSe, sinks_H, mask.documents_BS, mask, scale, self)
        out_BHSe: Tensor = _Partial.apply(*given)  # type: ignore[no-untyped-call]
        return out_BHSe

    @abstractmethod
    def visit(self, kv: Tensor, see: Callable[[int, Tensor], None]) -> None:
        """Call ``see(rank, kv)`` with those of every rank of cp, this one first. Collective."""

    @abstractmethod
    def visit_back(self, kv: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Call ``gradient(rank, kv)`` likewise. Return the sum over all ranks of the gradients of this rank's."""


class _Partial(torch.autograd.Function):
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
        out, lse_BHS = merged.out.to(q.dtype), merged.lse_BHS
        if sinks_H is not None:
            out, lse_BHS = with_sinks(out, lse_BHS, sinks_H)
        ctx.save_for_backward(q, k, v, out, lse_BHS, sinks_H, documents_BS)
        ctx.mask, ctx.scale, ctx.ranks = replace(mask, documents_BS=None), scale, ranks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse_BHS, sinks_H, documents_BS = ctx.saved_tensors
        visible = Visible(ctx.ranks.cut, replace(ctx.mask, documents_BS=documents_BS), q, ctx.scale)
        gradients = _Gradients(grad, q, out, lse_BHS, visible, k.shape[-1])
        grad_kv = ctx.ranks.visit_back(torch.cat([k, v], -1), gradients.of)
        grad_k, grad_v = grad_kv.to(k.dtype).split([k.shape[-1], v.shape[-1]], -1)
        grad_sinks = sink_gradient(grad, out, lse_BHS, sinks_H) if ctx.needs_input_grad[3] else None
        return gradients.grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None, None, None, None


class _Merged:
    """Output and log-sum-exp of the keys so far, at least fp32."""

    def __init__(self, q: Tensor, value_width: int, visible: Visible) -> None:
        self.q, self.visible, wide = q, visible, torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros((*q.shape[:-1], value_width), dtype=wide)
        self.lse_BHS = q.new_full(q.shape[:-1], -inf, dtype=wide)

    def add(self, source: int, kv: Tensor) -> None:
        k, v = kv.split([self.q.shape[-1], self.out.shape[-1]], -1)
        for queries, keys, scores, blind_BHS in self.visible.blocks(source):
            out, lse_BHS = kernels.forward(self.q[:, :, queries], k[:, :, keys], v[:, :, keys], scores)
            if blind_BHS is not None:
                lse_BHS = lse_BHS.masked_fill(blind_BHS, -inf)
            before_BHS = self.lse_BHS[:, :, queries]
            lse_BHS, mine_BHS = torch.logaddexp(before_BHS, lse_BHS), lse_BHS
            merged = self.out[:, :, queries]
            merged.mul_((before_BHS - lse_BHS).exp_().unsqueeze(-1))
            merged.add_(out * (mine_BHS - lse_BHS).exp_().unsqueeze(-1))
            before_BHS.copy_(lse_BHS)


class _Gradients:
    """Gradient of the queries so far, at least fp32, and that of the keys of each rank."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse_BHS: Tensor, visible: Visible, key_width: int) -> None:
        self.grad, self.q, self.out, self.lse_BHS, self.visible = grad, q, out, lse_BHS, visible
        self.key_width, self.grad_q = key_width, torch.zeros_like(q, dtype=lse_BHS.dtype)

    def of(self, source: int, kv: Tensor) -> Tensor:
        k, v = kv.split([self.key_width, kv.shape[-1] - self.key_width], -1)
        grad_kv = torch.zeros_like(kv, dtype=self.lse_BHS.dtype)
        for queries, keys, scores, blind_BHS in self.visible.blocks(source):
            lse_BHS = self.lse_BHS[:, :, queries]
            if blind_BHS is not None:
                lse_BHS = lse_BHS.masked_fill(blind_BHS, inf)
            grad, q, out = (x[:, :, queries] for x in (self.grad, self.q, self.out))
            grads = kernels.backward(grad, q, k[:, :, keys], v[:, :, keys], out, lse_BHS.contiguous(), scores)
            self.grad_q[:, :, queries] += grads[0]
            grad_kv[:, :, keys] += torch.cat(grads[1:], -1)
        return grad_kv
