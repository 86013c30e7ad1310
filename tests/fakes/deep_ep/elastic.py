"""``ElasticBuffer`` (V2) over gloo: deduplicated or expanded rows, cached handles, and the assertions of ``csrc/elastic``.

Without ``deterministic``, rows of a source and rows of an expert arrive in another order in each dispatch.
"""

from __future__ import annotations

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
    poisoned,
)


class EPHandle:
    """State that a dispatch leaves for a combine: the real handle's fields, and the fake's own bookkeeping."""

    def __init__(self, **fields) -> None:
        unknown = fields.keys() - {*SNAPSHOT["fields"]["EPHandle"], "source", "slots", "num_tokens"}
        demand(not unknown, f"a handle has no {unknown}")
        self.__dict__.update(dict.fromkeys(SNAPSHOT["fields"]["EPHandle"]) | fields)


class ElasticBuffer:
    """The V2 buffer."""

    @like("ElasticBuffer")
    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        if num_bytes is None:
            demand(num_max_tokens_per_rank > 0 and hidden > 0, "the buffer is sized by tokens and hidden size")
        sizes = everyone(group, num_max_tokens_per_rank)
        demand(len(set(sizes)) == 1, f"all ranks hold the same num_max_tokens_per_rank: {sizes}")
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        self.num_max_tokens_per_rank, self.sized_for = num_max_tokens_per_rank, (hidden, num_topk)
        self.deterministic, self.explicitly_destroy, self.runtime = deterministic, explicitly_destroy, object()
        self.draws = torch.Generator().manual_seed(self.rank_idx)

    @like("ElasticBuffer")
    def destroy(self):
        demand(self.explicitly_destroy, "`explicitly_destroy` flag must be set")
        self.runtime = None

    @like("ElasticBuffer")
    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        check_torch_deterministic()
        if num_sms == 0 and num_experts is None:
            raise TypeError("the number of SMs is computed from num_experts before the handle is looked at")
        demand(self.runtime is not None, "the buffer was destroyed")
        demand(not do_zero_padding or do_expand, "zero padding only makes sense with expand mode")
        demand(previous_event is None or allocate_on_comm_stream, "previous_event goes with allocate_on_comm_stream")
        cached = handle is not None
        if cached:
            demand(topk_idx is None, "a cached dispatch reuses the handle's ids")
            demand(not do_cpu_sync, "Cannot do CPU sync with cached handle")
            demand(do_expand == handle.do_expand, "a handle is used in the mode that it was made in")
            topk_idx = handle.topk_idx
            num_experts = handle.num_experts if num_experts is None else num_experts
            expert_alignment = handle.expert_alignment if expert_alignment is None else expert_alignment
            demand(
                (num_experts, expert_alignment) == (handle.num_experts, handle.expert_alignment), "aligned with handle"
            )
            demand(num_max_tokens_per_rank in (None, handle.num_max_tokens_per_rank), "aligned with the handle")
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        alignment = expert_alignment or 1
        check_rows(x)
        check_choices(topk_idx, topk_weights, len(x))
        self._check_size(x, topk_idx)
        demand(len(x) <= most, f"{len(x)} tokens are more than num_max_tokens_per_rank, {most}")
        demand(num_experts % self.num_ranks == 0, "experts are a multiple of the ranks")
        demand(do_cpu_sync in (None, True, False) and (cached or do_cpu_sync is not False), "the fake always syncs")
        owned = topk_idx[topk_idx >= 0]
        demand(bool((owned < num_experts).all()), "ids are below num_experts")
        local = num_experts // self.num_ranks
        event = EventHandle()
        sent = [x, topk_idx] if topk_weights is None else [x, topk_idx, topk_weights]
        source, rows, ids, *weights = self._send(sent, topk_idx, local, most)
        ids = ids - self.rank_idx * local
        ids = ids.masked_fill((ids < 0) | (ids >= local), -1)
        if not cached:
            order = source.argsort() if self.deterministic else self._as_they_come(source, most)
            handle = self._handle(event, topk_idx, source[order], ids[order], num_experts, alignment, most, do_expand)
        place = {int(one): position for position, one in enumerate(source)}
        order = torch.tensor([place[int(one)] for one in handle.source], dtype=torch.int64)
        rows, ids, weights = rows[order], ids[order], [one[order] for one in weights]
        if do_expand:
            rows, *weights = self._expand(handle, rows, weights, zero=do_zero_padding)
        given = [event.later(one) for one in (rows, *weights)]
        ids = None if do_expand else event.later(ids)
        weights = given[1] if len(given) > 1 else None
        return given[0], ids, weights, handle, finished(event, async_with_compute_stream)

    @like("ElasticBuffer")
    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        check_torch_deterministic()
        demand(self.runtime is not None, "the buffer was destroyed")
        check_rows(x)
        demand(x.shape[1] % 256 == 0, f"kHidden % 256 == 0 (static assertion of the combine kernel): {x.shape[1]}")
        self._check_size(x, handle.topk_idx)
        slots, k = handle.slots, handle.topk_idx.shape[1]
        expected = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        demand(len(x) == expected, f"combine takes the {expected} rows that were received, not {len(x)}")
        rows, weights = x.detach().float(), None
        if topk_weights is not None:
            shape = (len(x),) if handle.do_expand else (len(x), k)
            demand(topk_weights.shape == shape and topk_weights.dtype == torch.float32, f"topk_weights is fp32 {shape}")
            demand(topk_weights.is_contiguous(), "topk_weights is contiguous")
            weights = topk_weights.detach().clone()
        if handle.do_expand:
            rows = _of_slots(rows, slots).sum(1)
            weights = None if weights is None else _of_slots(weights, slots)
        event = EventHandle()
        out, gathered = self._return(handle, rows.to(x.dtype).float(), weights)
        given = None if gathered is None else event.later(gathered)
        return event.later(out.to(x.dtype)), given, finished(event, async_with_compute_stream)

    def _check_size(self, x: Tensor, ids: Tensor) -> None:
        hidden, num_topk = self.sized_for
        demand(x.shape[1] * x.element_size() % 32 == 0, "rows are aligned to 32 bytes (kNumTMAAlignBytes)")
        demand(x.shape[1] <= hidden, f"the buffer was sized for rows of {hidden}, not {x.shape[1]}")
        demand(not num_topk or ids.shape[1] <= num_topk, f"the buffer was sized for top-{num_topk}, not {ids.shape[1]}")

    def _send(self, tensors: list[Tensor], ids: Tensor, local: int, most: int) -> list[Tensor]:
        """Return the global token number of each row that arrived here, and the rows."""
        tokens = torch.arange(len(ids)) + self.rank_idx * most
        mine = [ids // local == rank for rank in range(self.num_ranks)]
        parts = [[one.detach()[to.any(1)].clone() for one in (tokens, *tensors)] for to in mine]
        arrived = [of_rank[self.rank_idx] for of_rank in everyone(self.group, parts)]
        return [torch.cat(column) for column in zip(*arrived)]

    def _handle(
        self,
        event: EventHandle,
        topk_idx: Tensor,
        source: Tensor,
        ids: Tensor,
        num_experts: int,
        alignment: int,
        most: int,
        do_expand: bool,
    ) -> EPHandle:
        local = num_experts // self.num_ranks
        counts = torch.bincount(ids[ids >= 0], minlength=local)
        aligned = -(-counts // alignment) * alignment
        starts = aligned.cumsum(0) - aligned
        slots = torch.full_like(ids, -1)
        for expert in range(local if do_expand else 0):
            here = ids == expert
            slots[here] = starts[expert] + self._drawn(int(here.sum()))
        owner = source // most if len(source) else source
        per_rank = torch.bincount(owner, minlength=self.num_ranks).cumsum(0)
        master = (ids >= 0).int().argmax(1) if len(ids) else source
        of_slots = slots if do_expand else poisoned(slots)
        metadata = torch.cat([source.unsqueeze(1), (owner * ids.shape[1] + master).unsqueeze(1), of_slots], 1)
        return EPHandle(
            do_expand=do_expand,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=most,
            num_sms=24,
            topk_idx=event.later(topk_idx.detach().clone()),
            num_recv_tokens=len(source),
            num_expanded_tokens=int(aligned.sum()),
            num_recv_tokens_per_expert_list=aligned.tolist(),
            psum_num_recv_tokens_per_scaleup_rank=event.later(per_rank.int()),
            psum_num_recv_tokens_per_expert=event.later((starts + counts if do_expand else aligned.cumsum(0)).int()),
            num_unaligned_recv_tokens_per_expert=event.later(counts.int()),
            recv_src_metadata=event.later(metadata),
            source=source.clone(),
            slots=slots,
            num_tokens=len(topk_idx),
        )

    def _as_they_come(self, source: Tensor, most: int) -> Tensor:
        """Return an order of rows by source rank, and within it by atomics: any."""
        drawn = self._drawn(len(source))
        return drawn[(source[drawn] // most).argsort(stable=True)]

    def _drawn(self, count: int) -> Tensor:
        """Return 0 to ``count`` in order, or without ``deterministic`` in any."""
        return torch.arange(count) if self.deterministic else torch.randperm(count, generator=self.draws)

    def _expand(self, handle: EPHandle, rows: Tensor, weights: list[Tensor], *, zero: bool) -> list[Tensor]:
        """Return one row for each (token, local expert), grouped by expert. Padding is poisoned unless ``zero``."""
        filled = [poisoned(rows.new_empty(handle.num_expanded_tokens, rows.shape[1]))]
        filled += [poisoned(one.new_empty(handle.num_expanded_tokens)) for one in weights]
        if zero:
            filled = [torch.zeros_like(one) for one in filled]
        taken, k = (handle.slots >= 0).nonzero(as_tuple=True)
        filled[0][handle.slots[taken, k]] = rows[taken]
        for target, one in zip(filled[1:], weights):
            target[handle.slots[taken, k]] = one[taken, k]
        return filled

    def _return(self, handle: EPHandle, rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        most, local = handle.num_max_tokens_per_rank, handle.num_experts // self.num_ranks
        owner, token = handle.source // most, handle.source % most
        mine = []
        for rank in range(self.num_ranks):
            to = owner == rank
            mine.append((token[to], rows[to], None if weights is None else weights[to]))
        out = rows.new_zeros(handle.num_tokens, rows.shape[1])
        gathered = None if weights is None else weights.new_zeros(handle.topk_idx.shape)
        for peer, of_rank in enumerate(everyone(self.group, mine)):
            tokens, values, of_weights = of_rank[self.rank_idx]
            out.index_add_(0, tokens, values)
            if gathered is not None:
                theirs = handle.topk_idx[tokens] // local == peer
                gathered[tokens] = torch.where(theirs, of_weights, gathered[tokens])
        return out, gathered


def _of_slots(values: Tensor, slots: Tensor) -> Tensor:
    """Return the value at each slot, zero where there is none."""
    found = values.new_zeros(*slots.shape, *values.shape[1:])
    found[slots >= 0] = values[slots[slots >= 0]]
    return found
