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
        buffer_class = module.Buffer
        ranks = shape.ranks
        row_bytes = BF16_BYTES * shape.model_dim
        configs = [buffer_class.get_dispatch_config(ranks), buffer_class.get_combine_config(ranks)]
        self.buffer = buffer_class(
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
        rows_ND, rows_work = self._send_rows(sent[0], handle)
        if len(sent) == 1:
            return [rows_ND], [rows_work]
        weights_TK = sent[1]
        k = weights_TK.shape[1]
        # (T, K) fp32 -> (T, 2 * K') bf16, the same bits
        as_rows = torch.nn.functional.pad(weights_TK, (0, -k % WEIGHTS_MULTIPLE)).view(torch.bfloat16)
        bits, weights_work = self._send_rows(as_rows, handle)
        # -> (N, K) fp32
        weights_NK = bits.view(torch.float32)[:, :k].detach()
        return [rows_ND, weights_NK], [rows_work, weights_work]

    def _send_rows(self, x_TD: Tensor, handle: Any) -> tuple[Tensor, Work]:
        """Start a dispatch of rows along a handle; return the rows that arrive, and the work to wait for."""
        received, _, _, _, _, event = self.buffer.dispatch(x_TD, handle=handle, async_finish=True)
        return received, EventWork(event)

    def send_back(self, sent: Sequence[Tensor], handle: Any) -> Moved:
        """Combine rows, and with them gradients of the weights if given."""
        weights_NK = sent[1] if len(sent) > 1 else None
        out_TD, out_TK, event = self.buffer.combine(sent[0], handle, topk_weights=weights_NK, async_finish=True)
        results = [out_TD] if weights_NK is None else [out_TD, out_TK]
        return results, [EventWork(event)]

    def close(self) -> None:
        """Destroy the buffer."""
        if self.buffer is not None:
            self.buffer.destroy()
            self.buffer = None
