"""Attention with grouped heads, a mask and sinks, as one node of autograd.

Legend, in addition to that of ``moefw/core/stages.py``: ``H`` heads of queries, ``G`` heads of keys and values,
``d`` width of a head of queries and keys, ``e`` that of values. ``S`` is the queries of ``q``, ``out`` and ``lse``, and
the keys of ``k``, ``v`` and ``documents``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefw.core.errors import ContractError
from moefw.runtime.attention import kernels
from moefw.runtime.attention.mask import Mask
from moefw.runtime.attention.sinks import sink_gradient, with_sinks


def attend(
    q_BHSd: Tensor,
    k_BGSd: Tensor,
    v_BGSe: Tensor,
    mask: Mask,
    *,
    sinks_H: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``out_BHSe`` in the dtype of ``q_BHSd``, and ``lse_BHS``, the logarithm of the softmax's denominator.

    Query head h attends to key head ``h // (H // G)`` (arXiv 2305.13245), with scores ``q k * scale``; ``scale`` is
    ``1 / sqrt(d)`` if None. The sink of a head is a score of one more key, whose value is zero: a row of weights sums
    to less than one (arXiv 2309.17453; learned as in gpt-oss, arXiv 2508.10925).

    ``lse_BHS`` includes the sink, has no gradient, and is fp32, or fp64 for fp64 queries. B and the number of queries
    may be 0. Raises ContractError on shapes that do not fit each other, and on a window below 1.
    """
    check(q_BHSd, k_BGSd, v_BGSe, mask, sinks_H)
    scale = 1.0 / sqrt(q_BHSd.shape[-1]) if scale is None else scale
    # Documents one by one need no mask. With a past, queries are fewer than keys, and lengths do not cut them.
    by_document = mask.lengths is not None and q_BHSd.shape[2] == k_BGSd.shape[2]
    lengths = mask.lengths if by_document else None
    documents_BS = None if by_document else mask.documents_BS
    # Autograd sees only tensors that are arguments themselves, so the fields of the mask are passed one by one.
    out_BHSe, lse_BHS = _Attend.apply(  # type: ignore[no-untyped-call]
        q_BHSd, k_BGSd, v_BGSe, sinks_H, documents_BS, lengths, mask.window, scale
    )
    return out_BHSe, lse_BHS


def behind(past: Sequence[Tensor] | None, made: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors ``made`` of tokens, such as keys and values, each behind that of the ``past``, if there is one.

    All have shape ``(..., positions, width)``.
    """
    if past is None:
        return tuple(made)
    return tuple(torch.cat(pair, -2) for pair in zip(past, made, strict=True))


def check(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSe: Tensor, mask: Mask, sinks_H: Tensor | None) -> None:
    """Raise ContractError if the arguments of :func:`attend` do not fit each other."""
    batch, heads, queries, width = q_BHSd.shape
    groups, keys = k_BGSd.shape[1:3]
    expected_shapes: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("k", k_BGSd, (batch, groups, keys, width)),
        ("v", v_BGSe, (batch, groups, keys, v_BGSe.shape[-1])),
        ("sinks", sinks_H, (heads,)),
        ("documents", mask.documents_BS, (batch, keys)),
    )
    wrong = [
        f"{name} is {tuple(tensor.shape)} and not {expected}"
        for name, tensor, expected in expected_shapes
        if tensor is not None and tensor.shape != expected
    ]
    if groups < 1 or heads % groups:
        wrong.append(f"{heads} heads of queries do not share {groups} heads of keys evenly")
    if queries > keys:
        wrong.append(f"{queries} queries are not the last of {keys} keys")
    if mask.lengths is not None and sum(mask.lengths) != keys:
        wrong.append(f"documents of {mask.lengths} positions are not {keys} keys")
    if mask.window is not None and mask.window < 1:
        wrong.append(f"a window of {mask.window} positions does not hold the query's own")
    if wrong:
        raise ContractError(f"attention to q {tuple(q_BHSd.shape)}: {'; '.join(wrong)}.", "Give it shapes that fit.")


class _Attend(torch.autograd.Function):
    """Saves its inputs, output and lse; makes the dense mask again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        documents_BS: Tensor | None,
        lengths: Sequence[int] | None,
        window: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        results = []
        for q_S, k_S, v_S in _by_document(lengths, q, k, v):
            scores = _scores(q_S, k_S, documents_BS, window, scale)
            results.append(kernels.forward(q_S, k_S, v_S, scores))
        out, lse_BHS = (_joined(parts) for parts in zip(*results, strict=True))
        if sinks_H is not None:
            out, lse_BHS = with_sinks(out, lse_BHS, sinks_H)
        ctx.save_for_backward(q, k, v, out, lse_BHS, sinks_H, documents_BS)
        ctx.mark_non_differentiable(lse_BHS)
        ctx.set_materialize_grads(False)
        ctx.lengths = lengths
        ctx.window = window
        ctx.scale = scale
        return out, lse_BHS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        q, k, v, out, lse_BHS, sinks_H, documents_BS = ctx.saved_tensors
        grads = []
        for grad_S, q_S, k_S, v_S, out_S, lse_S in _by_document(ctx.lengths, grad, q, k, v, out, lse_BHS):
            scores = _scores(q_S, k_S, documents_BS, ctx.window, ctx.scale)
            grads.append(kernels.backward(grad_S, q_S, k_S, v_S, out_S, lse_S.contiguous(), scores))
        grad_q, grad_k, grad_v = (_joined(parts) for parts in zip(*grads, strict=True))
        grad_sinks = sink_gradient(grad, out, lse_BHS, sinks_H) if ctx.needs_input_grad[3] else None
        return grad_q, grad_k, grad_v, grad_sinks, None, None, None, None


def _by_document(lengths: Sequence[int] | None, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield each tensor's part for each of the documents, which stand one behind another along positions."""
    if lengths is None:
        return iter([tensors])
    return zip(*(tensor.split(lengths, 2) for tensor in tensors), strict=True)


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _scores(q: Tensor, k: Tensor, documents_BS: Tensor | None, window: int | None, scale: float) -> kernels.Scores:
    mask = Mask(window=window, documents_BS=documents_BS)
    queries = q.shape[2]
    keys = k.shape[2]
    if mask.is_plain(queries, keys):
        return kernels.Scores(scale, causal=True)
    return kernels.Scores(scale, causal=False, visible_BHSS=mask.visible(queries, keys, q.device))
