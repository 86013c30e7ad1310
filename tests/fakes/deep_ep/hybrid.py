"""``HybridEPBuffer`` over gloo: rows permuted and padded on arrival, with or without a budget of rows."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from deep_ep.signatures import SNAPSHOT, like
from deep_ep.streams import check_rows, demand, everyone, poisoned

CHUNK = 64


class HybridEpConfigInstance:
    """The kernel's configuration; the fake keeps the routing of the call in it."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class HybridEPBuffer:
    """The buffer of the branch ``hybrid-ep``."""

    @like("HybridEPBuffer")
    def __init__(
        self,
        group,
        hidden_dim,
        max_num_of_tokens_per_rank,
        num_local_experts,
        use_fp8=False,
        num_sms_dispatch_api=None,
        num_sms_combine_api=None,
        num_sms_preprocessing_api=None,
        num_blocks_permute=None,
        num_blocks_unpermute=None,
        load_cached_kernels=False,
        use_shared_buffer=True,
        enable_custom_allgather=False,
        num_of_hybrid_ep_ranks_per_nvlink_domain=None,
        use_mnnvl=None,
    ):
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        domain = int(os.environ.get("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", self.group_size))
        demand(self.group_size % domain == 0, f"{self.group_size} ranks are not divisible by {domain} a domain")
        demand(self.group_size > 1, "a group of more than one rank")
        demand(domain <= 72, "at most 72 ranks in an NVLink domain")
        demand(hidden_dim % 16 == 0, f"hidden_dim % 16 == 0: {hidden_dim}")
        demand(num_local_experts * domain % 4 == 0, "experts of an NVLink domain are a multiple of 4")
        tokens = -(-max(max_num_of_tokens_per_rank, 512) // CHUNK) * CHUNK
        demand(domain == self.group_size or 3 * tokens + 1 < 65536, "max_num_of_tokens_per_rank with several domains")
        self.domain, self.hidden_dim, self.local, self.max_tokens = domain, hidden_dim, num_local_experts, tokens

    @like("HybridEPBuffer")
    def dispatch_with_permute(
        self,
        *,
        hidden,
        topk_idx=None,
        topk_weights=None,
        num_of_experts_per_rank=None,
        num_of_experts=None,
        use_fp8=None,
        routing_map=None,
        probs=None,
        scaling_factor=None,
        num_permuted_tokens=None,
        pad_multiple=None,
        handle=None,
        non_blocking=False,
        fuse_permute_dispatch=False,
        num_dispatched_tokens=None,
        use_host_meta=None,
    ):
        check_rows(hidden, what="hidden")
        tokens, hidden_dim = hidden.shape
        pad = pad_multiple or 1
        if non_blocking:
            demand(
                num_permuted_tokens is not None and num_permuted_tokens >= 0, "non-blocking needs num_permuted_tokens"
            )
            demand(num_permuted_tokens % pad == 0, "num_permuted_tokens is a multiple of pad_multiple")
        if handle is None:
            handle = self._preprocess(hidden, routing_map, num_permuted_tokens, pad, non_blocking)
            padded = handle[9].padded if non_blocking else handle[9].padded.clone()
            total = num_permuted_tokens if num_permuted_tokens is not None else int(padded.sum())
        else:
            if not isinstance(num_permuted_tokens, int):
                raise TypeError("HandleImpl.num_permuted_tokens is an int: a cached dispatch must be told")
            demand(handle[8] == tokens, "This handle could be invalid.")
            padded, total = None, num_permuted_tokens
        config = handle[9]
        demand(hidden_dim == config.hidden_dim, "a handle is used with rows of one size")
        demand(config.pad == pad, "a handle is used with the padding that it was made for")
        demand(int(config.padded.sum()) <= total, "rows are written past the end of the output")
        row_of = handle[6]
        rows, weights = poisoned(hidden.new_empty(total, hidden_dim)), None
        everything = torch.cat(everyone(self.group, hidden.detach().clone()))
        dense = config.routing[:, self.mine].any(1)
        token, expert = (row_of >= 0).nonzero(as_tuple=True)
        place = row_of[token, expert].long()
        ends = config.padded.cumsum(0)
        rows[: int(ends[-1])] = 0
        rows[place] = everything[dense][token]
        if probs is not None:
            demand(probs.dtype == torch.float32 and probs.is_contiguous(), "probs is contiguous fp32")
            demand(probs.shape == (tokens, config.routing.shape[1]), "probs has a column an expert")
            weights = poisoned(probs.new_empty(total))
            weights[: int(ends[-1])] = 0
            weights[place] = torch.cat(everyone(self.group, probs.detach().clone()))[dense][:, self.mine][token, expert]
        return rows, weights, None, padded, handle

    @like("HybridEPBuffer")
    def combine_with_unpermute(
        self,
        *,
        hidden,
        probs=None,
        handle=None,
        pad_multiple=None,
        fuse_unpermute_combine=False,
        num_dispatched_tokens=None,
    ):
        demand(handle is not None, "The handle is necessary in the combine pass.")
        check_rows(hidden, what="hidden")
        config, row_of, tokens = handle[9], handle[6], handle[8]
        demand(len(hidden) >= int(config.padded.sum()), "combine takes the rows that were received")
        demand(not (fuse_unpermute_combine and config.non_blocking), "the fused combine does not know of dropped rows")
        out = self._return(hidden.detach().float().unsqueeze(1), row_of, config, tokens)
        rows = torch.zeros(tokens, hidden.shape[1]).index_add_(0, out[0], out[1]).to(hidden.dtype)
        weights = None
        if probs is not None:
            demand(probs.dtype == torch.float32 and probs.is_contiguous(), "probs is contiguous fp32")
            demand(probs.shape == (len(hidden),), "probs is one weight a row")
            spread = torch.zeros(len(hidden), config.routing.shape[1])
            token, expert = (row_of >= 0).nonzero(as_tuple=True)
            place = row_of[token, expert].long()
            spread[place, expert + self.mine.start] = probs.detach()[place]
            out = self._return(spread.unsqueeze(1), row_of, config, tokens)
            weights = torch.zeros(tokens, config.routing.shape[1]).index_add_(0, out[0], out[1])
        return rows, weights

    @property
    def mine(self) -> slice:
        """The columns of this rank's experts."""
        return slice(self.rank * self.local, (self.rank + 1) * self.local)

    def _preprocess(
        self, hidden: Tensor, routing_map: Tensor, limit: int | None, pad: int, non_blocking: bool
    ) -> tuple:
        demand(routing_map is not None and routing_map.dtype == torch.bool, "routing_map is bool")
        tokens, num_experts = routing_map.shape
        demand(routing_map.is_contiguous() and tokens == len(hidden), "hidden and routing_map have as many rows")
        demand(tokens > 0, "a rank has at least one token")
        demand(num_experts == self.local * self.group_size, "routing_map has a column for each expert of the group")
        demand(tokens % CHUNK * self.domain % 4 == 0, "TMA 16B alignment error: the last chunk of tokens")
        shapes = everyone(self.group, tokens)
        demand(len(set(shapes)) == 1, f"all ranks send as many tokens, not {shapes}")
        demand(hidden.shape[1] == self.hidden_dim, "rows are as long as the buffer's")
        routing = torch.cat(everyone(self.group, routing_map.clone()))
        local = routing[:, self.mine]
        counts = local.sum(0)
        wanted = -(-counts // pad) * pad
        starts = wanted.cumsum(0) - wanted
        row_of = torch.where(local, local.long().cumsum(0) - 1 + starts, -1)[local.any(1)].int()
        flag = torch.tensor([torch.iinfo(torch.int32).max], dtype=torch.int32)
        if non_blocking:
            row_of = row_of.masked_fill(row_of >= limit, -1)
            flag = (starts + counts)[-1:].gt(limit).int()
            counts = torch.minimum(counts, (limit - starts).clamp_min(0))
        config = HybridEpConfigInstance(
            hidden_dim=hidden.shape[1],
            routing=routing,
            pad=pad,
            padded=-(-counts // pad) * pad,
            non_blocking=non_blocking,
        )
        made = {
            "dense_to_expert_map": row_of,
            "tokens_per_expert": counts.int(),
            "num_of_tokens_per_rank": tokens,
            "config": config,
            "overflow_flag": flag,
        }
        return tuple(made.get(name) for name in SNAPSHOT["handles"]["HybridEPBuffer"])

    def _return(
        self, values: Tensor, row_of: Tensor, config: HybridEpConfigInstance, tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens and values that the other ranks send back to this one."""
        dense = config.routing[:, self.mine].any(1).nonzero().squeeze(1)
        slot, expert = (row_of >= 0).nonzero(as_tuple=True)
        place = row_of[slot, expert].long()
        sums = values.new_zeros(len(dense), values.shape[2]).index_add_(0, slot, values[place].squeeze(1))
        sums = sums.to(torch.bfloat16).float() if values.shape[2] == config.hidden_dim else sums
        parts = []
        for rank in range(self.group_size):
            to = dense // tokens == rank
            parts.append((dense[to] % tokens, sums[to]))
        arrived = [of_rank[self.rank] for of_rank in everyone(self.group, parts)]
        return torch.cat([one for one, _ in arrived]), torch.cat([one for _, one in arrived])
