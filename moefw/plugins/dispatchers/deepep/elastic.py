"""``deep_ep.ElasticBuffer`` (V2): kernels compiled at run time, NCCL between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

import moefw
from moefw.core.context import ExpertGroup
from moefw.plugins.dispatchers.deepep.limits import Shape
from moefw.plugins.dispatchers.deepep.wire import Arrived, Choices, EventWork, Moved, Wire, in_order


class Elastic(Wire):
    """One ``ElasticBuffer`` for ``max_tokens`` per rank, the same number on every rank.

    Every dispatch gets ``num_experts``: the library computes its number of SMs from it before it reads the handle.
    """

    deterministic: ClassVar[bool]
    """Whether the library puts rows in order once they have arrived. Without, they are in any order."""
    layout: ClassVar[Mapping[str, Any]] = {}
    """How each dispatch lays out the rows that arrive, with and without a handle."""

    def __init__(self, module: Any, experts: ExpertGroup, shape: Shape, *, max_tokens: int) -> None:
        self.num_experts = shape.num_experts
        self.max_tokens = max_tokens
        self.ids_dtype = getattr(module, "topk_idx_t", torch.int64)
        self.buffer = module.ElasticBuffer(
            experts.group,
            num_max_tokens_per_rank=max_tokens,
            hidden=shape.model_dim,
            num_topk=shape.top_k,
            deterministic=self.deterministic,
            explicitly_destroy=True,
        )

    def dispatched(self, x_TD: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Any, EventWork]:
        """Rows, ids, weights, handle and work of a dispatch. ``options`` are those of the library.

        Raises ContractError where this rank has more tokens than the buffer was created for.
        """
        if len(x_TD) > self.max_tokens:
            raise moefw.ContractError(
                f"a rank sends {len(x_TD)} tokens; DeepEP's buffer was made for max_tokens: {self.max_tokens}.",
                "Set max_tokens to the most tokens of any rank and micro-batch.",
            )
        rows, ids, weights, handle, event = self.buffer.dispatch(
            x_TD, num_experts=self.num_experts, async_with_compute_stream=True, **self.layout, **options
        )
        return rows, ids, weights, handle, EventWork(event)

    def send_again(self, sent: Sequence[Tensor], handle: Any) -> Moved:
        """Dispatch along a handle, with the weights if there are any."""
        weights_TK = sent[1] if len(sent) > 1 else None
        rows, _, weights, _, work = self.dispatched(sent[0], topk_weights=weights_TK, handle=handle)
        results = [rows] if weights_TK is None else [rows, weights]
        return results, [work]

    def send_back(self, sent: Sequence[Tensor], handle: Any) -> Moved:
        """Combine rows, and with them gradients of the weights if given."""
        weights = sent[1] if len(sent) > 1 else None
        out_TD, out_TK, event = self.buffer.combine(
            sent[0], handle, topk_weights=weights, async_with_compute_stream=True
        )
        results = [out_TD] if weights is None else [out_TD, out_TK]
        return results, [EventWork(event)]

    def close(self) -> None:
        """Destroy the buffer."""
        if self.buffer is not None:
            self.buffer.destroy()
            self.buffer = None


@final
class ElasticWire(Elastic):
    """One row for each token that reaches a rank, in order (source rank, token)."""

    deterministic: ClassVar[bool] = True

    def send(self, x_TD: Tensor, weights_TK: Tensor, choices: Choices) -> Arrived:
        """Dispatch. Raises ContractError where this rank has more tokens than the buffer was created for."""
        rows_ND, ids_NK, weights_NK, handle, work = self.dispatched(
            x_TD, topk_idx=choices.ids_TK, topk_weights=weights_TK
        )
        expansion = partial(in_order, ids_NK, handle.num_recv_tokens_per_expert_list, choices)
        return Arrived(rows=rows_ND, weights=weights_NK, expansion=expansion, handle=handle, work=work)
