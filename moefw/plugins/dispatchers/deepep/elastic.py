"""``deep_ep.ElasticBuffer`` (V2): kernels compiled at run time, NCCL between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

import moefw
from moefw.core.context import ExpertGroup
from moefw.plugins.dispatchers.deepep.limits import Shape
from moefw.plugins.dispatchers.deepep.wire import Arrived, EventWork, Moved, Wire


@final
class ElasticWire(Wire):
    """One ``ElasticBuffer`` for ``max_tokens`` per rank, the same number on every rank.

    ``deterministic``: without it rows arrive in any order. The library does not group them by expert (``do_expand``):
    to put grouped rows in order it selects by masks, for which the host waits until they have arrived. Every dispatch
    gets ``num_experts``: the library computes its number of SMs from it before it reads the handle.
    """

    def __init__(self, module: Any, experts: ExpertGroup, shape: Shape, *, max_tokens: int) -> None:
        self.num_experts, self.max_tokens = shape.num_experts, max_tokens
        self.ids_dtype = getattr(module, "topk_idx_t", torch.int64)
        self.buffer = module.ElasticBuffer(
            experts.group,
            num_max_tokens_per_rank=max_tokens,
            hidden=shape.model_dim,
            num_topk=shape.top_k,
            deterministic=True,
            explicitly_destroy=True,
        )

    def send(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Arrived:
        """Dispatch. Raises ContractError where this rank has more tokens than the buffer was created for."""
        if len(x_TD) > self.max_tokens:
            what = f"a rank sends {len(x_TD)} tokens; DeepEP's buffer was made for max_tokens: {self.max_tokens}."
            raise moefw.ContractError(what, "Set max_tokens to the most tokens of any rank and micro-batch.")
        rows_ND, ids_NK, weights_NK, handle, event = self.buffer.dispatch(
            x_TD,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_experts=self.num_experts,
            async_with_compute_stream=True,
        )
        counts = handle.num_recv_tokens_per_expert_list
        return Arrived(rows_ND, ids_NK, weights_NK, counts, handle, EventWork(event))

    def send_again(self, sent: Sequence[Tensor], handle: Any) -> Moved:
        """Dispatch along a handle, with the weights if there are any."""
        weights_TK = sent[1] if len(sent) > 1 else None
        rows_ND, _, weights_NK, _, event = self.buffer.dispatch(
            sent[0],
            topk_weights=weights_TK,
            handle=handle,
            num_experts=self.num_experts,
            async_with_compute_stream=True,
        )
        return [rows_ND] if weights_TK is None else [rows_ND, weights_NK], [EventWork(event)]

    def send_back(self, sent: Sequence[Tensor], handle: Any) -> Moved:
        """Combine rows, and with them gradients of the weights if given."""
        weights_NK = sent[1] if len(sent) > 1 else None
        out_TD, out_TK, event = self.buffer.combine(
            sent[0], handle, topk_weights=weights_NK, async_with_compute_stream=True
        )
        return [out_TD] if weights_NK is None else [out_TD, out_TK], [EventWork(event)]

    def close(self) -> None:
        """Destroy the buffer."""
        if self.buffer is not None:
            self.buffer.destroy()
            self.buffer = None
