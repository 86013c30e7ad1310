"""Largest logits of an attention on a rank, and what its core computes of the same queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any
from unittest.mock import patch

import torch
from attrs import frozen
from torch import Tensor

from moefw.compose.build import LayerContext, open_layout
from moefw.runtime.attention.largest_logits import MeasuredCore
from moefw.runtime.attention.mask import Mask
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.attention_case import AttentionCase, attention_of
from moefw.testing.suites.watch import worst_error
from moefw.training.logits import Logits

CLIPPED = {"tokens_per_step": 16, "micro_batch": 1, "seq_len": 16, "optimizer": {"use": "muon", "qk_clip": 1.0}}
"""A section ``train`` whose optimizer clips logits above 1."""


class MeasuredAttention:
    """Attention of a layer case with :data:`CLIPPED`, whose largest logits are known."""

    def __init__(self, layer_case: LayerCase) -> None:
        self.attention, assembly, self._tp = attention_of(layer_case)
        layout = open_layout(assembly, "cpu")
        self._logits = Logits(self.attention, layout)
        (self.core,) = (module for module in self.attention.modules() if isinstance(module, MeasuredCore))
        self._dim = layer_case.dim

    @property
    def groups(self) -> int:
        """Number of groups of heads that are clipped together."""
        groups: int = min(rows.heads for rows in self.attention.logit_rows().values())
        return groups

    def largest(self, case: AttentionCase) -> Tensor:
        """Largest logit ``(H)`` of each head of all ranks."""
        self._logits.start()
        batch = case.batch(self._tp)
        x_BSD, _ = case.drawn(self._dim, torch.float32)
        with torch.no_grad():
            self.attention(batch.own(x_BSD.flatten(0, 1)), self.attention.tables(batch), batch)
        self._logits.reduced()
        return self.core.largest_H.clone()

    def clip(self, group: int, factor: float) -> None:
        """Scale the rows of a group as if its largest logit were above the threshold by one over ``factor``."""
        self.core.largest_H.fill_(0.0).view(self.groups, -1)[group] = self.core.clip.threshold / factor
        self._logits.clip()


def largest_on_rank(layer_case: LayerCase, case: AttentionCase) -> Tensor:
    """Largest logit ``(H)`` of each head of all ranks, as this rank knows it."""
    return MeasuredAttention(layer_case).largest(case)


@frozen(eq=False)
class Called:
    """A call of the function that an attention gives to ``context.core``, and the log-sum-exp that it returned."""

    q_BHSd: Tensor
    k_BGSd: Tensor
    mask: Mask
    sinks_H: Tensor | None
    scale: float | None
    lse_BHS: Tensor

    @property
    def error(self) -> float:
        """Error of the log-sum-exp of scores q k times the scale, as a share of the largest value."""
        q, k = self.q_BHSd.double(), self.k_BGSd.double()
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
        visible = self.mask.visible(q.shape[2], k.shape[2], q.device)
        lse_BHS = scores.masked_fill(~visible, -inf).logsumexp(-1)
        if self.sinks_H is not None:
            lse_BHS = torch.logaddexp(lse_BHS, self.sinks_H.double().unsqueeze(-1))
        return worst_error(self.lse_BHS, lse_BHS)


@contextmanager
def noted_calls() -> Iterator[list[Called]]:
    """Block in which attentions are built whose calls are noted. Yield these."""
    calls: list[Called] = []
    core = LayerContext.core

    def noting(attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def noted(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> tuple[Tensor, Tensor]:
            out, lse = attend(q, k, v, mask, **options)
            calls.append(Called(q, k, mask, options.get("sinks_H"), options.get("scale"), lse))
            return out, lse

        return noted

    with patch.object(LayerContext, "core", lambda context, attend: core(context, noting(attend))):
        yield calls
