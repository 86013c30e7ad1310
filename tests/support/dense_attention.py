"""Attention by the definition, in fp64, and inputs for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moefw.runtime.attention.mask import Mask


@dataclass(frozen=True)
class AttentionCase:
    """Sizes of an attention, as in the legend of ``moefw/runtime/attention/attend.py``."""

    batch: int = 2
    heads: int = 4
    groups: int = 2
    queries: int = 7
    keys: int = 7
    width: int = 8
    value_width: int = 8
    window: int | None = None
    documents: bool = False
    sinks: bool = False
    scale: float | None = None

    def drawn(self, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Mask]:
        """Return queries, keys, values and the sinks if there are any, with gradients, and the mask."""
        draws = torch.Generator().manual_seed(self.keys)
        shapes: list[tuple[int, ...]] = [
            (self.batch, self.heads, self.queries, self.width),
            (self.batch, self.groups, self.keys, self.width),
            (self.batch, self.groups, self.keys, self.value_width),
        ]
        shapes += [(self.heads,)] * self.sinks
        tensors = [torch.randn(shape, generator=draws).to(dtype).requires_grad_() for shape in shapes]
        steps = torch.rand(self.batch, self.keys, generator=draws) < 0.3
        return tensors, Mask(window=self.window, documents_BS=steps.cumsum(1) if self.documents else None)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, mask: Mask, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp: a softmax over visible keys and the sink, whose value is zero."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    key = torch.arange(k.shape[2])
    query = key[k.shape[2] - q.shape[2] :, None]
    visible = (key <= query) & (query - key < (mask.window or k.shape[2]))
    if (documents := mask.documents_BS) is not None:
        visible = visible & (documents[:, None, query] == documents[:, None, None, :])
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    sink = scores.new_full((q.shape[1],), -torch.inf) if sinks is None else sinks
    scores = torch.cat([scores.masked_fill(~visible, -torch.inf), sink[:, None, None].expand(*q.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)
