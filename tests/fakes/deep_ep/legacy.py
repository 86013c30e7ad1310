"""``Buffer`` (V1) over gloo: intranode semantics and every assertion of ``csrc/legacy`` and its kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deep_ep.signatures import SNAPSHOT, like
from deep_ep.streams import (
    EventHandle,
    check_choices,
    check_rows,
    check_torch_deterministic,
    demand,
    everyone,
    finished,
)

NVLINK_PEERS, RDMA_PEERS, TMA_BYTES = 8, 20, 8192


class Config:
    """Number of SMs and sizes of chunks, from which buffer sizes follow."""

    def __init__(self, num_sms: int, *chunks: int) -> None:
        demand(len(chunks) == 4 and chunks[0] < chunks[1] and 2 * chunks[2] <= chunks[3], "chunk sizes")
        self.num_sms, self.chunks = num_sms, chunks

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        demand(num_ranks < NVLINK_PEERS or num_ranks % NVLINK_PEERS == 0, "ranks below 8 or a multiple of 8")
        rows = self.num_sms // 2 * min(num_ranks, NVLINK_PEERS) * self.chunks[1]
        return -(-rows * (hidden_bytes + 128 * 12 + 8) // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        if num_ranks <= NVLINK_PEERS:
            return 0
        return -(-self.num_sms // 2 * num_ranks // NVLINK_PEERS * self.chunks[3] * hidden_bytes * 2 // 128) * 128


class Buffer:
    """The V1 buffer."""

    num_sms: int = 20

    @like("Buffer")
    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        use_fabric=None,
        explicitly_destroy=False,
        enable_shrink=False,
        comm=None,
    ):
        size = group.size()
        demand(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "buffers in units of 128 bytes")
        demand(size < NVLINK_PEERS or size % NVLINK_PEERS == 0, "ranks below 8 or a multiple of 8")
        demand(size <= NVLINK_PEERS * RDMA_PEERS, "at most 160 ranks")
        demand(num_rdma_bytes == 0 or size > NVLINK_PEERS, "RDMA buffers only beyond one node")
        self.group, self.group_size, self.rank = group, size, group.rank()
        self.num_nvl_bytes, self.explicitly_destroy, self.runtime = num_nvl_bytes, explicitly_destroy, object()
        everyone(group, "ipc handles")

    @like("Buffer")
    def destroy(self):
        demand(self.explicitly_destroy, "`explicitly_destroy` flag must be set")
        demand(self.runtime is not None, "a buffer is destroyed once")
        self.runtime = None

    @staticmethod
    @like("Buffer")
    def get_dispatch_config(num_ranks):
        demand(num_ranks in SNAPSHOT["ranks"]["get_dispatch_config"], f"Unsupported number of EP ranks: {num_ranks}")
        return Config(Buffer.num_sms, 6, 256, 6, 128)

    @staticmethod
    @like("Buffer")
    def get_combine_config(num_ranks):
        demand(num_ranks in SNAPSHOT["ranks"]["get_combine_config"], f"Unsupported number of EP ranks: {num_ranks}")
        return Config(Buffer.num_sms, 4, 256, 6, 128)

    @like("Buffer")
    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        self._check_call(previous_event, async_finish, allocate_on_comm_stream)
        check_choices(topk_idx, None, len(topk_idx))
        demand(num_experts > 0 and num_experts % self.group_size == 0, "experts are a multiple of the ranks")
        to_rank = self._ranks(topk_idx, num_experts)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        event = EventHandle()
        layout = [event.later(one) for one in (to_rank.sum(0).int(), per_expert, to_rank)]
        return layout[0], None, layout[1], layout[2], finished(event, async_finish)

    @like("Buffer")
    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        check_torch_deterministic()
        config = self.get_dispatch_config(self.group_size) if config is None else config
        self._check_call(previous_event, async_finish, allocate_on_comm_stream)
        self._check_rows(x, config)
        event = EventHandle()
        if handle is not None:
            demand(topk_idx is None and topk_weights is None, "a cached dispatch takes neither ids nor weights")
            to_rank, source = handle[4], handle[3]
            received = self._send(x, to_rank)
            demand(len(received) == len(source), "a handle is used with the tokens that it was made for")
            return event.later(received), None, None, None, None, finished(event, async_finish)
        demand(
            num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None,
            "a dispatch without a handle takes the layout",
        )
        demand((topk_idx is None) == (topk_weights is None), "ids and weights go together")
        demand(is_token_in_rank.dtype == torch.bool and is_token_in_rank.shape == (len(x), self.group_size), "layout")
        demand(num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32, "the layout's counts are int32")
        demand(is_token_in_rank.is_contiguous(), "the layout is contiguous")
        local = len(num_tokens_per_expert) // self.group_size
        demand(
            len(num_tokens_per_expert) % self.group_size == 0 and local <= 128,
            "at most 128 experts a rank (one thread each)",
        )
        demand(num_worst_tokens == 0, "the fake does not do worst-case buffers")
        check_choices(topk_idx, topk_weights, len(x))
        demand(
            torch.equal(is_token_in_rank, self._ranks(topk_idx, local * self.group_size)), "the layout is of topk_idx"
        )
        ids, weights = self._send(topk_idx, is_token_in_rank), self._send(topk_weights, is_token_in_rank)
        ids = ids - self.rank * local
        mine = (ids >= 0) & (ids < local)
        ids, weights = ids.masked_fill(~mine, -1), weights.masked_fill(~mine, 0.0)
        counts = torch.bincount(ids[ids >= 0], minlength=local)
        aligned = (-(-counts // expert_alignment) * expert_alignment).tolist()
        source = self._send(torch.arange(len(x), dtype=torch.int32), is_token_in_rank)
        per_rank = torch.tensor(everyone(self.group, is_token_in_rank.sum(0).tolist()), dtype=torch.int32)
        channels = torch.zeros(self.group_size, config.num_sms // 2, dtype=torch.int32)
        made = (per_rank.cumsum(0).int(), channels, channels.clone(), source, is_token_in_rank, is_token_in_rank.int())
        made = (*(event.later(one) for one in made[:4]), is_token_in_rank, event.later(made[5]))
        rows = [event.later(one) for one in (self._send(x, is_token_in_rank), ids, weights)]
        return *rows, aligned, made, finished(event, async_finish)

    @like("Buffer")
    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        check_torch_deterministic()
        config = self.get_combine_config(self.group_size) if config is None else config
        self._check_call(previous_event, async_finish, allocate_on_comm_stream)
        self._check_rows(x, config)
        demand(x.dtype == torch.bfloat16, "combine adds up bf16")
        prefix, _, _, source, to_rank, _ = handle
        demand(len(x) == len(source), "combine takes as many rows as were received")
        event = EventHandle()
        rows = event.later(self._return(x.float(), prefix, source, len(to_rank)).to(x.dtype))
        weights = None
        if topk_weights is not None:
            demand(topk_weights.dtype == torch.float32 and topk_weights.dim() == 2, "topk_weights is an fp32 matrix")
            demand(len(topk_weights) == len(x) and topk_weights.is_contiguous(), "one row of weights a received row")
            demand(topk_weights.shape[1] <= 32, "top-k is at most 32")
            weights = event.later(self._return(topk_weights, prefix, source, len(to_rank)))
        return rows, weights, finished(event, async_finish)

    def _check_call(self, previous_event: Any, asynchronous: bool, on_comm_stream: bool) -> None:
        demand(self.runtime is not None, "the buffer was destroyed")
        demand(not on_comm_stream or (previous_event is not None and asynchronous), "allocation on the other stream")

    def _check_rows(self, x: Tensor, config: Config) -> None:
        demand(config.num_sms % 2 == 0, "The SM count must be even")
        check_rows(x)
        row = x.shape[1] * x.element_size()
        demand(row % 32 == 0 and row // 2 + 8 <= TMA_BYTES, f"TMA moves half a row, in 16 bytes, at most 8184: {row}")
        hint = config.get_nvl_buffer_size_hint(row, self.group_size)
        demand(hint <= self.num_nvl_bytes, f"num_nvl_bytes: {self.num_nvl_bytes} is less than {hint}")

    def _ranks(self, ids: Tensor, num_experts: int) -> Tensor:
        """Return the mask of the ranks that each token goes to, bool (T, R)."""
        owner = torch.where(ids >= 0, ids // (num_experts // self.group_size), self.group_size)
        chosen = torch.zeros(len(ids), self.group_size + 1, dtype=torch.bool)
        return chosen.scatter_(1, owner, True)[:, : self.group_size].contiguous()

    def _send(self, rows: Tensor, to_rank: Tensor) -> Tensor:
        """Send rows to their ranks; they arrive in order of (source rank, token)."""
        parts = everyone(self.group, [rows.detach()[to_rank[:, rank]].clone() for rank in range(self.group_size)])
        return torch.cat([of_rank[self.rank] for of_rank in parts])

    def _return(self, rows: Tensor, prefix: Tensor, source: Tensor, num_tokens: int) -> Tensor:
        """Send rows back and sum them by token."""
        ends = [0, *prefix[:, self.rank].tolist()]
        pieces = [slice(*pair) for pair in pairwise(ends)]
        mine = [(rows.detach()[one].clone(), source[one].long().clone()) for one in pieces]
        out = rows.new_zeros(num_tokens, rows.shape[1])
        for of_rank in everyone(self.group, mine):
            values, tokens = of_rank[self.rank]
            out.index_add_(0, tokens, values)
        return out
