"""The MoE layer: route, dispatch, experts, combine, as a tuple of phases.

A phase is a function of one frozen pytree that returns the next. Its tensors are all that crosses to the next phase.

``x_TD -> route -> Routed -> send -> Sent -> receive -> Received -> compute -> Computed -> send_back -> Returning
-> collect -> Collected``

The caller's own tensors, such as the residual, pass through all phases as ``beside``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from moefw.core.contracts import Dispatcher
from moefw.core.stages import Batch, DispatchHandle, ExpertBatch, LayerStats, Pending, Routing, stage
from moefw.runtime.compute.row_keys import with_keys
from moefw.runtime.memory.static_rows import StaticRows, computing_on
from moefw.runtime.phases import Phase, straight


@stage
class Routed:
    """Tokens and their experts."""

    x_TD: Tensor
    routing: Routing
    batch: Batch
    beside: Any = None


@stage
class Sent:
    """The dispatch in flight."""

    pending: Pending
    x_TD: Tensor
    routing: Routing
    batch: Batch
    beside: Any = None


@stage
class Received:
    """The rows of this rank's experts, and the output of the shared expert."""

    rows: ExpertBatch
    handle: DispatchHandle
    shared_TD: Tensor | None
    routing: Routing
    batch: Batch
    beside: Any = None


@stage
class Computed:
    """The output of the experts, by row."""

    rows_RD: Tensor
    handle: DispatchHandle
    shared_TD: Tensor | None
    stats: LayerStats
    beside: Any = None


@stage
class Returning:
    """The combine in flight."""

    pending: Pending
    shared_TD: Tensor | None
    stats: LayerStats
    beside: Any = None


@stage
class Collected:
    """The output of the layer, by token."""

    out_TD: Tensor
    stats: LayerStats
    beside: Any = None


class MoELayer(nn.Module):
    """Routed experts of layer ``number``, and a shared expert that runs while rows travel.

    :meth:`forward` runs :meth:`route` and then ``phases`` in order; a scheduler may run them one by one.
    ``first_expert`` is the number of this rank's first expert if the experts' recipe draws, so that rows need keys;
    None: it does not draw. ``budgeted``: the number of rows is static, except in dropless steps.
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
        region: Callable[[str, Callable[..., Any]], Callable[..., Any]] = lambda _, function: function,
        movement: Callable[..., Callable[..., Any]] = lambda _, finish, __: finish,
    ) -> None:
        super().__init__()
        self.number, self.router, self.experts, self.shared_expert = number, router, experts, shared_expert
        self.dispatcher, self.first_expert, self.budgeted = dispatcher, first_expert, budgeted
        self._route = region("router", router.__call__)
        self._experts = region("experts", experts.__call__)
        self._shared = None if shared_expert is None else region("shared_experts", shared_expert.__call__)
        self._arrive = movement("dispatch", self._finish_dispatch, self._dispatch_again)
        keys: tuple[Phase, ...] = () if first_expert is None else (self.give_keys,)
        self.phases: tuple[Phase, ...] = (
            self.send,
            self.receive,
            *keys,
            self.compute,
            self.send_back,
            self.collect,
        )

    def forward(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, LayerStats]:
        """Return ``out_TD`` and the layer's statistics. T may be 0."""
        collected: Collected = straight(self.phases)(self.route(x_TD, batch))
        return collected.out_TD, collected.stats

    def route(self, x_TD: Tensor, batch: Batch, beside: Any = None) -> Routed:
        """Choose the experts of each token."""
        return Routed(x_TD=x_TD, routing=self._route(x_TD, batch), batch=batch, beside=beside)

    def send(self, routed: Routed) -> Sent:
        """Exchange metadata, and start the dispatch."""
        x_TD, routing, batch = routed.x_TD, routed.routing, routed.batch
        plan = self.dispatcher.plan(routing, dropless=batch.dropless)
        pending = self.dispatcher.start_dispatch(x_TD, routing.weights_TK, plan)
        return Sent(pending=pending, x_TD=x_TD, routing=routing, batch=batch, beside=routed.beside)

    def receive(self, sent: Sent) -> Received:
        """Run the shared expert while the dispatch is in flight, and finish the dispatch.

        The shared expert reads its tokens through a graph node of its own. Its gradients are summed there before they
        are added to those of other phases, so a cut between phases changes no bit.
        """
        shared_TD = None if self._shared is None else self._shared(sent.x_TD.view_as(sent.x_TD), sent.batch)
        rows, handle = self._arrive(sent.pending, sent.x_TD, sent.routing.weights_TK)
        return Received(
            rows=rows, handle=handle, shared_TD=shared_TD, routing=sent.routing, batch=sent.batch, beside=sent.beside
        )

    def give_keys(self, received: Received) -> Received:
        """Dispatch the keys of the tokens, if the recipe draws random numbers for rows."""
        batch, weights_TK = received.batch, received.routing.weights_TK
        if batch.keys_T is None:
            return received
        assert self.first_expert is not None
        rows = with_keys(
            received.rows,
            received.handle,
            batch.own(batch.keys_T),
            weights_TK,
            self.dispatcher,
            first_expert=self.first_expert,
        )
        return replace(received, rows=rows)

    def compute(self, received: Received) -> Computed:
        """Run the routed experts."""
        rows, routing = received.rows, received.routing
        valid = StaticRows(rows) if self.budgeted and not received.batch.dropless else None
        if valid is None:
            rows_RD, stats = self._experts(rows), rows.stats
        else:
            with computing_on(valid):
                rows_RD, stats = self._experts(rows), valid.stats
        return Computed(
            rows_RD=rows_RD,
            handle=received.handle,
            shared_TD=received.shared_TD,
            stats=LayerStats(
                stats={**routing.stats, **stats} if stats else routing.stats,
                aux_losses=routing.aux_losses,
                expert_ids_TK=routing.expert_ids_TK if routing.choices_TK is None else routing.choices_TK,
            ),
            beside=received.beside,
        )

    def send_back(self, computed: Computed) -> Returning:
        """Start the combine."""
        pending = self.dispatcher.start_combine(computed.rows_RD, computed.handle)
        return Returning(pending=pending, shared_TD=computed.shared_TD, stats=computed.stats, beside=computed.beside)

    def collect(self, returning: Returning) -> Collected:
        """Finish the combine, and add the output of the shared expert."""
        out_TD = self.dispatcher.finish_combine(returning.pending)
        if returning.shared_TD is not None:
            out_TD = out_TD + returning.shared_TD
        return Collected(out_TD=out_TD, stats=returning.stats, beside=returning.beside)

    def _finish_dispatch(
        self, pending: Pending, x_TD: Tensor, weights_TK: Tensor
    ) -> tuple[ExpertBatch, DispatchHandle]:
        return self.dispatcher.finish_dispatch(pending)

    def _dispatch_again(self, handle: DispatchHandle, x_TD: Tensor, weights_TK: Tensor) -> ExpertBatch:
        batch, _ = self.dispatcher.redispatch(x_TD, weights_TK, handle)
        return batch
