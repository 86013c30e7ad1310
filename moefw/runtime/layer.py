"""The MoE layer: route -> dispatch -> experts -> combine, as a tuple of phases.

``x_TD -> router -> Routing -> plan -> DispatchPlan -> dispatch -> ExpertBatch + DispatchHandle
-> experts -> rows_RD -> combine -> out_TD``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from moefw.core.contracts import Dispatcher
from moefw.core.stages import Batch, DispatchHandle, ExpertBatch, LayerStats, Pending, Routing
from moefw.runtime.compute.row_keys import with_keys
from moefw.runtime.memory.static_rows import StaticRows, computing_on

Phase = Callable[..., Any]


@dataclass(slots=True, eq=False)
class Carry:
    """State that phases pass on. ``x`` is ``(T, D)`` inside the layer. ``residual`` and ``rope`` are for the block."""

    x: Tensor
    batch: Batch
    routing: Routing | None = None
    pending: Pending | None = None
    arrival: Mapping[str, Tensor] = field(default_factory=dict)
    shared_TD: Tensor | None = None
    residual: Tensor | None = None
    rope: Any = None

    def layer_stats(self) -> LayerStats:
        """Return the statistics of the layer, once it has routed."""
        assert self.routing is not None
        routing = self.routing
        stats = {**routing.stats, **self.arrival} if self.arrival else routing.stats
        choices_TK = routing.expert_ids_TK if routing.choices_TK is None else routing.choices_TK
        return LayerStats(stats=stats, aux_losses=routing.aux_losses, expert_ids_TK=choices_TK)


class MoELayer(nn.Module):
    """Routed experts of layer ``number``, and a shared expert that runs while rows travel.

    :meth:`forward` runs the ``phases`` in order; a scheduler may run them one by one. ``first_expert`` is the number of
    this rank's first expert if the experts' recipe draws, so that rows need keys; None: it does not draw.
    ``budgeted``: the number of rows is static, except in dropless steps.
    """

    def __init__(
        self,
        *,
        number: int,
        router: nn.Module,
        dispatcher: Dispatcher,
        experts: nn.Module,
        shared_expert: nn.Module | None = None,
        first_expert: int | None = None,
        budgeted: bool = False,
        region: Callable[[str, Phase], Phase] = lambda _, function: function,
        movement: Callable[[str, Phase, Phase], Phase] = lambda _, finish, __: finish,
    ) -> None:
        super().__init__()
        self.number, self.router, self.experts, self.shared_expert = number, router, experts, shared_expert
        self.dispatcher, self.first_expert, self.budgeted = dispatcher, first_expert, budgeted
        self._route = region("router", router.__call__)
        self._experts = region("experts", experts.__call__)
        self._shared = None if shared_expert is None else region("shared_experts", shared_expert.__call__)
        self._arrive = movement("dispatch", self._finish_dispatch, self._dispatch_again)
        self.phases = (self.route_and_send, self.compute_and_return, self.collect)

    def forward(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, LayerStats]:
        """Return ``out_TD`` and the layer's statistics. T may be 0."""
        carry = Carry(x_TD, batch)
        for phase in self.phases:
            phase(carry)
        return carry.x, carry.layer_stats()

    def route_and_send(self, carry: Carry) -> None:
        """Choose experts and start the dispatch."""
        routing = self._route(carry.x, carry.batch)
        plan = self.dispatcher.plan(routing, dropless=carry.batch.dropless)
        carry.routing = routing
        carry.pending = self.dispatcher.start_dispatch(carry.x, routing.weights_TK, plan)

    def compute_and_return(self, carry: Carry) -> None:
        """Run the shared expert while rows travel, then the routed experts, and start the combine."""
        assert carry.pending is not None
        assert carry.routing is not None
        if self._shared is not None:
            carry.shared_TD = self._shared(carry.x, carry.batch)
        batch, handle = self._arrive(carry.pending, carry.x, carry.routing.weights_TK)
        if self.first_expert is not None and carry.batch.keys_T is not None:
            keys_T, weights_TK = carry.batch.own(carry.batch.keys_T), carry.routing.weights_TK
            batch = with_keys(batch, handle, keys_T, weights_TK, self.dispatcher, first_expert=self.first_expert)
        rows = StaticRows(batch) if self.budgeted and not carry.batch.dropless else None
        if rows is None:
            rows_RD, carry.arrival = self._experts(batch), batch.stats
        else:
            with computing_on(rows):
                rows_RD, carry.arrival = self._experts(batch), rows.stats
        carry.pending = self.dispatcher.start_combine(rows_RD, handle)

    def collect(self, carry: Carry) -> None:
        """Sum each token's rows, and add the shared expert."""
        assert carry.pending is not None
        out_TD = self.dispatcher.finish_combine(carry.pending)
        carry.x = out_TD if carry.shared_TD is None else out_TD + carry.shared_TD

    def _finish_dispatch(
        self, pending: Pending, x_TD: Tensor, weights_TK: Tensor
    ) -> tuple[ExpertBatch, DispatchHandle]:
        return self.dispatcher.finish_dispatch(pending)

    def _dispatch_again(self, handle: DispatchHandle, x_TD: Tensor, weights_TK: Tensor) -> ExpertBatch:
        batch, _ = self.dispatcher.redispatch(x_TD, weights_TK, handle)
        return batch
