"""``deep_ep.Buffer`` (V1): NVLink inside a node, NVSHMEM between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from moefw.core.context import ExpertGroup
from moefw.plugins.dispatchers.deepep.limits import Shape
from moefw.plugins.dispatchers.deepep.wire import Arrived, Choices, EventWork, Moved, Wire, in_order
from moefw.runtime.communication.movement import Work

BF16_BYTES = 2
WEIGHTS_MULTIPLE = 8
"""Weights are padded to a multiple of this, 32 bytes: the kernel moves half rows in units of 16 bytes."""


@final
class BufferWire(Wire):
    """One ``Buffer``, sized for the library's recommended configurations."""

    def __init__(self, module: Any, experts: ExpertGroup, shape: Shape) -> None:
        self.num_experts = shape.num_experts
        self.ids_dtype = getattr(module, "topk_idx_t", torch.int64)
        kind, ranks, row_bytes = module.Buffer, shape.ranks, BF16_BYTES * shape.model_dim
        configs = [kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)]
        self.buffer = kind(
            experts.group,
            num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs),
            num_rdma_bytes=max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs),
            explicitly_destroy=True,
        )

    def send(self, x_TD: Tensor, weights_TK: Tensor, choices: Choices) -> Arrived:
        """Compute the layout on the device and dispatch. The host waits once, inside ``dispatch``."""
        ids_TK = choices.ids_TK
        per_rank, per_node, per_expert, to_rank, _ = self.buffer.get_dispatch_layout(ids_TK, self.num_experts)
        rows_ND, ids_NK, weights_NK, counts, handle, event = self.buffer.dispatch(
            x_TD,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=to_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            async_finish=True,
        )
        expansion = partial(in_order, ids_NK, counts, choices)
        return Arrived(rows=rows_ND, weights=weights_NK, expansion=expansion, handle=handle, work=EventWork(event))

    def send_again(self, sent: Sequence[Tensor], handle: Any) -> Moved:
        """Dispatch along a handle. A cached dispatch carries no weights: a second one carries their bits as rows."""
        received, works = self._again(sent[0], handle)
        if len(sent) == 1:
            return [received], works
        k = sent[1].shape[1]
        as_rows = torch.nn.functional.pad(sent[1], (0, -k % WEIGHTS_MULTIPLE)).view(torch.bfloat16)
        bits, more = self._again(as_rows, handle)
        return [received, bits.view(torch.float32)[:, :k].detach()], [*works, *more]

    def _again(self, x_TD: Tensor, handle: Any) -> tuple[Tensor, list[Work]]:
        received, _, _, _, _, event = self.buffer.dispatch(x_TD, handle=handle, async_finish=True)
        return received, [EventWork(event)]

    def send_back(self, sent: Sequence[Tensor], handle: Any) -> Moved:
        """Combine rows, and with them gradients of the weights if given."""
        weights_NK = sent[1] if len(sent) > 1 else None
        out_TD, out_TK, event = self.buffer.combine(sent[0], handle, topk_weights=weights_NK, async_finish=True)
        return [out_TD] if weights_NK is None else [out_TD, out_TK], [EventWork(event)]

    def close(self) -> None:
        """Destroy the buffer."""
        if self.buffer is not None:
            self.buffer.destroy()
            self.buffer = None
