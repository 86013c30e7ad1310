"""Hierarchical dispatch through DeepEP's HybridEP. Shapes: legend in :mod:`moefw.core.stages`.

The library scans the gathered routing map by (rank, token), so rows of an expert arrive in the promised order.
It runs on the current stream: for that stream, a movement that has started is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import moefw
from moefw.core.context import ExpertGroup
from moefw.core.contracts import Dispatcher
from moefw.core.stages import ExpertBatch, Pending, Routing
from moefw.plugins.dispatchers.budget import Budget, check_tokens
from moefw.plugins.dispatchers.hybridep.limits import CHUNK, Shape, ranks_per_node
from moefw.plugins.dispatchers.hybridep.wire import COUNTS, OVERFLOW, HybridWire, Landed
from moefw.runtime.communication.exchange import exchange_now
from moefw.runtime.communication.movement import Work, finish, start
from moefw_kernels.devices import on_device, on_host
from moefw_kernels.permute import Groups, group_chunks

Moved = tuple[list[Tensor], list[Work]]


def build(
    experts: ExpertGroup, context: moefw.BuildContext, *, budget: Budget | None = None, max_tokens: int | None = None
) -> Dispatcher[Any, Any]:
    """Dispatcher of this process over the buffer that all its layers share.

    Raises PlanError where the library is missing or does not support the layer.
    """
    row_alignment = context.facts["row_alignment"]
    shape = Shape(
        model_dim=context.site.dims.model_dim,
        local_experts=experts.local_experts,
        ranks=experts.size,
        node_ranks=ranks_per_node(experts.nodes),
    )
    key = ("hybrid_ep", tuple(dist.get_process_group_ranks(experts.group)), shape, max_tokens)
    wire = context.shared(key, lambda: HybridWire(experts, shape, max_tokens=max_tokens))
    return LibraryHybridEP(
        experts,
        wire,
        row_alignment=row_alignment,
        key_columns=shape.model_dim,
        budget=budget,
        max_tokens=max_tokens,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """The choices of a movement over the experts of all ranks, with tokens padded to the same number on every rank.

    ``choosing_rows`` is the number of rows, of all ranks, that choose this rank's experts. It is set where dropped rows
    are counted.
    """

    routing_TE: Tensor
    ids_TK: Tensor
    num_tokens: int
    alignment: int
    capacity: int
    budget: int | None
    choosing_rows: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Dispatched:
    """Result of a dispatch without its rows: the library's handle, and how groups are padded to a capacity."""

    choices: _Choices
    handle: tuple[Any, ...]
    sizes_e: Tensor
    num_rows: int
    groups: Groups | None


@dataclass(slots=True, eq=False)
class _Trip:
    """One dispatch: the launch stores the library's results for the launch of its dual and for the finish."""

    dispatched: _Dispatched | None = None


@final
class LibraryHybridEP(Dispatcher[_Choices, _Dispatched]):
    """``dispatch_with_permute`` and ``combine_with_unpermute``, each the dual of the other along one handle.

    With ``max_tokens`` and no capacity, every rank pads to ``max_tokens``. Otherwise, ranks first agree on the most
    tokens, on the host. Rows beyond the budget are dropped and reported: ``overflow`` is 1 where some were dropped,
    ``dropped_rows`` is their number. Keys travel as rows of the model's width, for which the kernels are compiled.
    """

    def __init__(
        self,
        experts: ExpertGroup,
        wire: HybridWire,
        *,
        row_alignment: int,
        key_columns: int,
        budget: Budget | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.experts = experts
        self.wire = wire
        self.row_alignment = row_alignment
        self.key_columns = key_columns
        self.budget = budget
        self.max_tokens = max_tokens

    def plan(
        self, routing: Routing, *, counts: Sequence[Sequence[int]] | None = None, dropless: bool = False
    ) -> _Choices:
        """Build the routing map over all experts. The library gathers it; ``counts`` is unused."""
        ids_TK = routing.expert_ids_TK
        experts = self.experts
        budget = None if dropless else self.budget
        num_tokens, top_k = ids_TK.shape
        most_tokens, capacity = self._agree(num_tokens, routing.capacity, ids_TK.device)
        if capacity and budget is not None:
            raise moefw.ContractError(
                "HybridEP has no budget of rows and a capacity of each expert at once.",
                "Leave rank_capacity out, or route without a capacity.",
            )
        # (T, K) -> (rows, K * etp): every rank has the same number of tokens, and each part of an expert is an expert.
        rows = max(1, -(-most_tokens // CHUNK)) * CHUNK
        parts_TK = F.pad(experts.parts(ids_TK), (0, 0, 0, rows - num_tokens), value=-1)
        # -> (rows, num_parts): the choices as a map. Choices of no expert go to one more column, which is cut off.
        num_parts = experts.local_experts * experts.size
        columns_TK = torch.where(parts_TK >= 0, parts_TK, num_parts)
        routing_TE = torch.zeros(rows, num_parts + 1, dtype=torch.bool, device=ids_TK.device)
        routing_TE = routing_TE.scatter_(1, columns_TK, True)[:, :num_parts].contiguous()
        counts_dropped = budget is not None and budget.on_overflow == "drop"
        return _Choices(
            routing_TE,
            columns_TK,
            num_tokens,
            alignment=1 if capacity else self.row_alignment,
            capacity=capacity,
            budget=None if budget is None else budget.rows(most_tokens * top_k * experts.etp, self.row_alignment),
            choosing_rows=self._choosing_rows(routing_TE) if counts_dropped else None,
        )

    def _agree(self, num_tokens: int, capacity: int | None, device: torch.device) -> tuple[int, int]:
        """Most tokens that a rank has, and the sum of all capacities.

        A rank without tokens has a capacity of 0, not None: either all ranks have a capacity or none has.
        """
        if self.max_tokens is not None and capacity is None:
            check_tokens(num_tokens, self.max_tokens)
            return self.max_tokens, 0
        ones = [1] * self.experts.size
        lines_to_P = F.pad(torch.full((self.experts.size, 1), num_tokens, device=device), (0, 1), value=capacity or 0)
        (lines_from,) = on_host(exchange_now(lines_to_P, ones, ones, self.experts.metadata_group))
        lengths, capacities = zip(*lines_from, strict=True)
        return max(lengths), sum(capacities)

    def _choosing_rows(self, routing_TE: Tensor) -> Tensor:
        """Number of rows, over all ranks, that choose this rank's experts. Stays on the device."""
        ones = [1] * self.experts.size
        sent_Pe = routing_TE.sum(0).view(self.experts.size, self.experts.local_experts)
        return exchange_now(sent_Pe, ones, ones, self.experts.metadata_group).sum()

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: _Choices) -> Pending[_Trip]:
        """Send each token once to each node, and there to the ranks of its experts."""
        trip = _Trip()

        def send(sent: Sequence[Tensor]) -> Moved:
            # (rows, D) and (rows, num_parts) -> (R, D) and (R), grouped by expert
            landed = self.wire.send(sent[0], sent[1], plan.routing_TE, alignment=plan.alignment, budget=plan.budget)
            groups = self._groups(landed, plan)
            trip.dispatched = _Dispatched(plan, landed.handle, landed.sizes_e, len(landed.rows_RD), groups)
            return [landed.rows_RD, landed.weights_R], []

        def send_back(grads: Sequence[Tensor]) -> Moved:
            assert trip.dispatched is not None
            return self._send_back(grads, trip.dispatched)

        return start(self._sent(x_TD, weights_TK, plan), forward=send, dual=send_back, detail=trip)

    def start_redispatch(self, x_TD: Tensor, weights_TK: Tensor, handle: _Dispatched) -> Pending[_Trip]:
        """Send along the handle. The routing map is not gathered again."""
        return start(
            self._sent(x_TD, weights_TK, handle.choices),
            forward=partial(self._send_again, dispatched=handle),
            dual=partial(self._send_back, dispatched=handle),
            detail=_Trip(handle),
        )

    def _sent(self, x_TD: Tensor, weights_TK: Tensor, choices: _Choices) -> list[Tensor]:
        """Tokens padded to the same number on every rank, and their weights with one column per expert.

        Raises ContractError for tokens that are not bf16.
        """
        if x_TD.dtype is not torch.bfloat16:
            raise moefw.ContractError(
                f"HybridEP moves bf16 rows; these are {x_TD.dtype}.", "Use precision: {use: bf16}."
            )
        rows, num_parts = choices.routing_TE.shape
        missing = rows - choices.num_tokens
        if missing:
            # (T, D) -> (rows, D)
            x_TD = F.pad(x_TD, (0, 0, 0, missing))
        # (T, K) -> (rows, K * etp) -> (rows, num_parts). Each part of an expert has the weight of the expert.
        if self.experts.etp > 1:
            weights_TK = weights_TK.repeat_interleave(self.experts.etp, 1)
        weights_TK = F.pad(weights_TK, (0, 0, 0, missing))
        weights_TE = weights_TK.new_zeros(rows, num_parts + 1).scatter(1, choices.ids_TK, weights_TK)
        return [x_TD, weights_TE[:, :num_parts]]

    def _send_again(self, sent: Sequence[Tensor], dispatched: _Dispatched) -> Moved:
        """Dispatch rows, and weights if given, along a handle. Nothing to wait for."""
        probs_TE = sent[1] if len(sent) > 1 else None
        received = self.wire.send_again(
            sent[0],
            probs_TE,
            dispatched.handle,
            alignment=dispatched.choices.alignment,
            num_rows=dispatched.num_rows,
        )
        return received, []

    def _send_back(self, sent: Sequence[Tensor], dispatched: _Dispatched) -> Moved:
        """Combine rows, and weights if given, along a handle. Nothing to wait for."""
        weights_R = sent[1] if len(sent) > 1 else None
        alignment = dispatched.choices.alignment
        return self.wire.send_back(sent[0], weights_R, dispatched.handle, alignment=alignment), []

    def _groups(self, landed: Landed, choices: _Choices) -> Groups | None:
        """How groups are padded to their capacity; None without one: the library has padded them."""
        if not choices.capacity:
            return None
        sizes = landed.sizes_e.tolist()
        return group_chunks([sizes], self.row_alignment, landed.rows_RD.device, capacity=choices.capacity)

    def finish_dispatch(self, pending: Pending[_Trip]) -> tuple[ExpertBatch, _Dispatched]:
        """Rows as they arrived, padded to a capacity if there is one."""
        rows_RD, weights_R = finish(pending)
        handle = pending.detail.dispatched
        assert handle is not None
        if handle.groups is not None:
            return ExpertBatch.of(handle.groups.regroup(rows_RD, weights_R), handle.groups), handle
        counts_e: Tensor = handle.handle[COUNTS]
        batch = ExpertBatch(
            rows_RD=rows_RD,
            row_weights_R=weights_R,
            counts_e=counts_e,
            offsets_e=on_device(handle.sizes_e, counts_e.device).cumsum(0, dtype=torch.int32),
            counts_host=tuple(handle.sizes_e.tolist()) if handle.choices.budget is None else None,
            stats=self._stats(handle.handle, handle.choices),
        )
        return batch, handle

    def _stats(self, handle: tuple[Any, ...], choices: _Choices) -> dict[str, Tensor]:
        """Statistics of a budget. Empty without a budget."""
        if choices.budget is None:
            return {}
        if choices.choosing_rows is not None:
            return {"dropped_rows": (choices.choosing_rows - handle[COUNTS].sum()).float()}
        return {"overflow": handle[OVERFLOW].reshape(()).float()}

    def start_combine(self, rows_RD: Tensor, handle: _Dispatched) -> Pending[int]:
        """Add up each token over its experts here, in the node and between nodes."""
        if handle.groups is not None:
            # Without the padding to a capacity, which the library does not know.
            rows_RD = handle.groups.restore(rows_RD)
        # (R, D) -> (rows, D)
        return start(
            [rows_RD],
            forward=partial(self._send_back, dispatched=handle),
            dual=partial(self._send_again, dispatched=handle),
            detail=handle.choices.num_tokens,
        )

    def finish_combine(self, pending: Pending[int]) -> Tensor:
        """Drop the tokens that pad this rank's: ``(rows, D)`` to ``(T, D)``."""
        (out_TD,) = finish(pending)
        return out_TD[: pending.detail]
