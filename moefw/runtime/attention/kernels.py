"""PyTorch's attention kernels, with the log-sum-exp of the scores, and their backward of an outside log-sum-exp.

The backward of FlashAttention (arXiv 2205.14135, algorithm 4; 2307.08691, algorithm 2) computes probabilities again as
``exp(score - lse)``. Of an ``out`` and ``lse`` over more scores than those with ``k``, it therefore returns the exact
gradients through these scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.runtime.accounting import Core, attending

aten = torch.ops.aten
FLASH_WIDTH = 256
"""The widest head of the flash kernels for CUDA."""
ALIGNMENT = 8
"""Kernels for CUDA take heads of a multiple of so many elements, and masks with such strides."""
LSE_ALIGNMENT = 32
"""The efficient kernels for CUDA pad ``lse`` to a multiple of so many positions."""


class Scores(NamedTuple):
    """How queries and keys make scores."""

    scale: float
    causal: bool
    """Whether query i sees keys up to i only. There are as many keys as queries then, and ``visible`` is None."""
    visible_BHSS: Tensor | None = None
    """bool, B and H may be 1: whether a query sees a key. Each sees one. None: all that ``causal`` leaves."""


Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


class _Kernel(NamedTuple):
    """The kernel of a device. Heads of queries, keys, values and output have one width, their elements are adjacent."""

    forward: Callable[[Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor]]
    """Of q, k, v: output and lse."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Scores], Gradients]
    """Of the output's gradient, q, k, v, output and lse: gradients of q, k, v."""
    alignment: int
    """The width of heads is a multiple of it."""


def forward(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSe: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """``out_BHSe`` in the dtype of ``q_BHSd``, and ``lse_BHS`` in fp32, or in fp64 if ``q_BHSd`` is."""
    out_shape = (*q_BHSd.shape[:-1], v_BGSe.shape[-1])
    if not q_BHSd.numel():
        dtype = torch.promote_types(q_BHSd.dtype, torch.float32)
        return q_BHSd.new_empty(out_shape), q_BHSd.new_empty(out_shape[:-1], dtype=dtype)
    kernel = KERNELS[q_BHSd.device.type]
    q, k, v = _widened(kernel, q_BHSd, k_BGSd, v_BGSe)
    with attending(partial(_core, q_BHSd, k_BGSd, v_BGSe, scores)):
        out, lse_BHS = kernel.forward(q, k, v, scores)
    return _narrowed(out, v_BGSe.shape[-1]), lse_BHS


def backward(
    grad_BHSe: Tensor,
    q_BHSd: Tensor,
    k_BGSd: Tensor,
    v_BGSe: Tensor,
    out_BHSe: Tensor,
    lse_BHS: Tensor,
    scores: Scores,
) -> Gradients:
    """Gradients of ``q_BHSd``, ``k_BGSd`` and ``v_BGSe`` through their scores.

    ``out_BHSe`` and ``lse_BHS`` may be of these scores and others.
    """
    if not q_BHSd.numel():
        return torch.zeros_like(q_BHSd), torch.zeros_like(k_BGSd), torch.zeros_like(v_BGSe)
    kernel = KERNELS[q_BHSd.device.type]
    grad, q, k, v, out = _widened(kernel, grad_BHSe, q_BHSd, k_BGSd, v_BGSe, out_BHSe)
    with attending(partial(_core, q_BHSd, k_BGSd, v_BGSe, scores)):
        grad_q, grad_k, grad_v = kernel.backward(grad, q, k, v, out, lse_BHS, scores)
    key_width = q_BHSd.shape[-1]
    value_width = v_BGSe.shape[-1]
    return _narrowed(grad_q, key_width), _narrowed(grad_k, key_width), _narrowed(grad_v, value_width)


def _core(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSe: Tensor, scores: Scores) -> Core:
    """What is computed, before heads are widened."""
    batch, heads, queries, key_width = q_BHSd.shape
    return Core(
        queries=batch * heads * queries,
        keys=k_BGSd.shape[2],
        heads=batch * heads,
        key_width=key_width,
        value_width=v_BGSe.shape[-1],
        num_seen=_num_seen(batch * heads, queries, k_BGSd.shape[2], scores),
    )


def _num_seen(heads: int, queries: int, keys: int, scores: Scores) -> int:
    """Number of scores of all heads that the mask shows."""
    if scores.causal:
        return heads * queries * (queries + 1) // 2
    if scores.visible_BHSS is None:
        return heads * queries * keys
    num_masks = prod(scores.visible_BHSS.shape[:2])
    return heads // num_masks * int(scores.visible_BHSS.sum())


def _widened(kernel: _Kernel, *tensors: Tensor) -> list[Tensor]:
    """Heads padded with zeros to the widest, with adjacent elements. Zeros change no score and no value."""
    widest = max(x.shape[-1] for x in tensors)
    width = widest + -widest % kernel.alignment
    padded = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _narrowed(x: Tensor, width: int) -> Tensor:
    """First ``width`` elements of heads, in storage of their own: a view would keep the wider one."""
    return x if x.shape[-1] == width else x.narrow(-1, 0, width).clone()


def _bias(q: Tensor, visible_BHSS: Tensor | None, alignment: int) -> Tensor | None:
    """Bias that a mask adds to scores, 0 or -inf, with rows a multiple of ``alignment`` elements apart."""
    if visible_BHSS is None:
        return None
    keys = visible_BHSS.shape[-1]
    padded_keys = keys + -keys % alignment
    bias = q.new_full((*visible_BHSS.shape[:-1], padded_keys), -inf).narrow(-1, 0, keys)
    return bias.masked_fill_(visible_BHSS, 0.0)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q,
        k,
        v,
        dropout_p=0.0,
        is_causal=scores.causal,
        attn_mask=_bias(q, scores.visible_BHSS, 1),
        scale=scores.scale,
    )
    return out, lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores) -> Gradients:
    grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        dropout_p=0.0,
        is_causal=scores.causal,
        attn_mask=_bias(q, scores.visible_BHSS, 1),
        scale=scores.scale,
    )
    return grad_q, grad_k, grad_v


def _takes_flash(q: Tensor, scores: Scores) -> bool:
    """Whether the flash kernels for CUDA compute these scores: 16 bits, and no mask but the causal one."""
    is_16_bit = q.dtype in (torch.float16, torch.bfloat16)
    return is_16_bit and scores.visible_BHSS is None and q.shape[-1] <= FLASH_WIDTH


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    if _takes_flash(q, scores):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q,
            k,
            v,
            0.0,  # dropout_p
            scores.causal,
            scale=scores.scale,
        )
        return out, lse
    spread_k, spread_v = _spread(q, k, v)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q,
        spread_k,
        spread_v,
        _cuda_bias(q, scores),
        True,  # compute_log_sumexp
        0.0,  # dropout_p
        scores.causal,
        scale=scores.scale,
    )
    return out, lse.narrow(-1, 0, q.shape[2])


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Gradients:
    # Without dropout, no kernel reads the state of its random numbers: an empty tensor of the right dtype does.
    if _takes_flash(q, scores):
        with _in_fixed_order():
            grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_backward(
                grad,
                q,
                k,
                v,
                out,
                lse.contiguous(),
                None,  # cum_seq_q: sequences have one length
                None,  # cum_seq_k
                q.shape[2],  # max_q
                k.shape[2],  # max_k
                0.0,  # dropout_p
                scores.causal,
                q.new_empty(2, dtype=torch.uint64),  # philox_seed
                q.new_empty((), dtype=torch.uint64),  # philox_offset
                scale=scores.scale,
            )
        return grad_q, grad_k, grad_v
    spread_k, spread_v = _spread(q, k, v)
    with _in_fixed_order():
        grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad,
            q,
            spread_k,
            spread_v,
            _cuda_bias(q, scores),
            out.transpose(1, 2).contiguous().transpose(1, 2),  # the only layout whose rows the kernel finds
            F.pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=inf),
            q.new_empty((), dtype=torch.int64),  # philox_seed
            q.new_empty((), dtype=torch.int64),  # philox_offset
            0.0,  # dropout_p
            [True, True, True, False],  # gradients of q, k and v, and none of the bias
            scores.causal,
            scale=scores.scale,
        )
    return grad_q, _gathered(grad_k, k), _gathered(grad_v, v)


@contextmanager
def _in_fixed_order() -> Iterator[None]:
    """Let the kernels add up gradients in one order.

    By default, blocks of keys add to the gradients of queries as they happen to finish, and two equal steps differ in
    their last bits.
    """
    switches: Any = torch.utils.deterministic
    mode = torch.get_deterministic_debug_mode()
    fills_memory = switches.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    switches.fill_uninitialized_memory = False
    try:
        yield
    finally:
        switches.fill_uninitialized_memory = fills_memory
        torch.set_deterministic_debug_mode(mode)


def _cuda_bias(q: Tensor, scores: Scores) -> Tensor | None:
    bias = _bias(q, scores.visible_BHSS, ALIGNMENT)
    return None if bias is None else bias.expand(*q.shape[:2], -1, -1)


def _spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each of the queries."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return k, v
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _gathered(grad: Tensor, of: Tensor) -> Tensor:
    """Gradient of ``of`` from that of its heads spread."""
    if grad.shape == of.shape:
        return grad
    summed: Tensor = grad.unflatten(1, (of.shape[1], -1)).sum(2)
    return summed


KERNELS = {
    "cpu": _Kernel(forward=_cpu_forward, backward=_cpu_backward, alignment=1),
    "cuda": _Kernel(forward=_cuda_forward, backward=_cuda_backward, alignment=ALIGNMENT),
}
