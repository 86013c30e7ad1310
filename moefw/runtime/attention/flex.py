"""The attention of :func:`moefw.runtime.attention.attend.attend` by FlexAttention, which skips blocks nobody sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from moefw.runtime.attention.attend import check
from moefw.runtime.attention.mask import Mask
from moefw_kernels.devices import takes_kernels


def attend(
    q_BHSd: Tensor,
    k_BGSd: Tensor,
    v_BGSe: Tensor,
    mask: Mask,
    *,
    sinks_H: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``out_BHSe`` and ``lse_BHS`` as :func:`moefw.runtime.attention.attend.attend` does (arXiv 2412.05496).

    On a GPU it is compiled. On a CPU it computes all scores, and no gradients. Raises ContractError as that does.
    """
    check(q_BHSd, k_BGSd, v_BGSe, mask, sinks_H)
    run = _compiled() if takes_kernels(q_BHSd) else flex_attention
    out_BHSe, aux = run(
        q_BHSd,
        k_BGSd,
        v_BGSe,
        block_mask=block_mask(mask, q_BHSd, k_BGSd),
        scale=1.0 / sqrt(q_BHSd.shape[-1]) if scale is None else scale,
        enable_gqa=q_BHSd.shape[1] != k_BGSd.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    lse_BHS: Tensor = aux.lse
    if sinks_H is not None:
        # As in ``with_sinks``, but differentiable: here autograd, not a Function, has the gradient of the sinks.
        lse_with_sinks_BHS = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype).unsqueeze(-1))
        out_BHSe = (out_BHSe * (lse_BHS - lse_with_sinks_BHS).exp().unsqueeze(-1)).to(out_BHSe.dtype)
        lse_BHS = lse_with_sinks_BHS
    return out_BHSe, lse_BHS.detach()


def block_mask(mask: Mask, q_BHSd: Tensor, k_BGSd: Tensor) -> BlockMask:
    """Blocks of scores that have visible keys, for all heads."""
    queries = q_BHSd.shape[2]
    keys = k_BGSd.shape[2]
    return create_block_mask(
        mask_function(mask, queries, keys),
        B=None if mask.documents_BS is None else len(q_BHSd),
        H=None,
        Q_LEN=queries,
        KV_LEN=keys,
        device=q_BHSd.device,
        _compile=takes_kernels(q_BHSd),
    )


def mask_function(mask: Mask, queries: int, keys: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Function (sequence, head, query, key) that :func:`create_block_mask` asks whether a query sees a key.

    Its arguments are integer tensors, of which each query counts from the first of ``queries``.
    """

    def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query + (keys - queries)
        visible = position >= key
        if mask.window is not None:
            visible = visible & (position - key < mask.window)
        if mask.documents_BS is not None:
            visible = visible & (mask.documents_BS[sequence, position] == mask.documents_BS[sequence, key])
        return visible

    return sees


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)
