"""The MoE layer in phases: route, dispatch, experts, combine, cut where rows start to travel and where they arrive.

A phase is a function of one frozen pytree that returns the next. Its tensors are all that crosses to the next phase.

``x_TD -> send -> Sent -> receive -> Received -> compute -> Returning -> collect -> out_TD``

What arrives has a phase of its own, so that buffers of the movement are free before experts compute.

The caller's own tensors, such as the residual, pass through all phases as ``beside``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moefw.core.contracts import Dispatcher
from moefw.core.stages import Batch, ExpertBatch, LayerStats, Pending, Routing, tensor_dataclass
from moefw.runtime.compute.row_keys import with_keys
from moefw.runtime.forward_context import forward_with
from moefw.runtime.memory.static_rows import StaticRows
from moefw.runtime.phases import Function, Phase
from moefw.runtime.replayed_routes import differences, filled
from moefw.runtime.router_entropy import ROUTER_ENTROPY, entropy_of_scores


@tensor_dataclass
class Sent:
    """The dispatch in flight."""

    pending: Pending[Any]
    x_TD: Tensor
    routing: Routing
    batch: Batch
    beside: Any = None


@tensor_dataclass
class Received:
    """The rows of this rank's experts, and the output of the shared expert."""

    rows: ExpertBatch
    handle: Any
    shared_TD: Tensor | None
    routing: Routing
    dropless: bool
    beside: Any = None


@tensor_dataclass
class Returning:
    """The combine in flight."""

    pending: Pending[Any]
    shared_TD: Tensor | None
    stats: LayerStats
    beside: Any = None


class MoELayer(nn.Module):
    """Routed experts of layer ``number``, and a shared expert that runs while rows travel.

    :meth:`forward` runs the phases in order: :meth:`send`, :meth:`receive`, :meth:`compute` and :meth:`collect`. The
    block of a model runs the same ones (:meth:`phases`), and a scheduler may run them one by one.

    ``first_expert`` is the number of this rank's first expert if the experts' recipe draws, so that rows need keys;
    None: it does not draw. ``budgeted``: the number of rows is static, except in dropless steps.
    """

    def __init__(
        self,
        *,
        number: int,
        router: nn.Module,
        dispatcher: Dispatcher[Any, Any],
        experts: nn.Module,
        shared_expert: nn.Module | None = None,
        first_expert: int | None = None,
        budgeted: bool,
        region: Callable[[str, Callable[..., Any]], Callable[..., Any]],
        movement: Callable[..., Callable[..., Any]],
    ) -> None:
        super().__init__()
        self.number = number
        self.router = router
        self.experts = experts
        self.shared_expert = shared_expert
        self.dispatcher = dispatcher
        self.first_expert = first_expert
        self.budgeted = budgeted
        self._route = region("router", self._choose)
        self._experts = region("experts", experts.__call__)
        self._shared = None if shared_expert is None else region("shared_experts", shared_expert.__call__)
        self._arrive = movement("dispatch", self._finish_dispatch, self._dispatch_again)

    def forward(self, x_TD: Tensor, batch: Batch) -> tuple[Tensor, LayerStats]:
        """``out_TD`` and the layer's statistics. T may be 0."""
        sent = self.send(x_TD, batch)
        received = self.receive(sent)
        returning = self.compute(received)
        return self.collect(returning), returning.stats

    def phases(self, send: Function, collect: Function) -> tuple[Phase, ...]:
        """Phases of :meth:`forward`, for a caller that does more at both ends.

        ``send`` returns what :meth:`send` returns, and ``collect`` gets what :meth:`collect` gets: a block begins with
        attention and ends with the residual connection.
        """
        return (
            Phase(send, name="attend", layer=self.number, starts=True),
            Phase(self.receive, name="receive", layer=self.number, finishes=True),
            Phase(self.compute, name="compute", layer=self.number, starts=True),
            Phase(collect, name="collect", layer=self.number, finishes=True),
        )

    def send(self, x_TD: Tensor, batch: Batch, beside: Any = None) -> Sent:
        """Choose the experts of each token, exchange metadata, and start the dispatch."""
        routing: Routing = self._route(x_TD, batch)
        plan = self.dispatcher.plan(routing, dropless=batch.dropless)
        pending = self.dispatcher.start_dispatch(x_TD, routing.weights_TK, plan)
        if self.training:
            routing = _with_entropy(routing, batch.mask_T)
        if batch.trained_share is not None:
            aux_losses = {name: batch.over_trained(loss) for name, loss in routing.aux_losses.items()}
            routing = replace(routing, aux_losses=aux_losses)
        return Sent(pending=pending, x_TD=x_TD, routing=routing, batch=batch, beside=beside)

    def _choose(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Routing of the tokens: to the experts that the batch names, and else to those that the router chooses."""
        if batch.routes is None or self.number not in batch.routes:
            routing: Routing = self.router(x_TD, batch)
            return routing
        with torch.no_grad(), forward_with(aux_losses=[]):  # those of the second call are the ones that count
            free: Routing = self.router(x_TD, replace(batch, routes=None))
        chosen_TK = free.expert_ids_TK if free.choices_TK is None else free.choices_TK
        given_TK = batch.route(self.number, *chosen_TK.shape)
        assert given_TK is not None, "the batch has routes of this layer"
        ids_TK = filled(given_TK, chosen_TK)
        routing = self.router(x_TD, replace(batch, routes={**batch.routes, self.number: ids_TK}))
        return replace(routing, stats={**routing.stats, **differences(given_TK, chosen_TK)})

    def receive(self, sent: Sent) -> Received:
        """Run the shared expert while the dispatch is in flight, and finish the dispatch.

        The shared expert reads its tokens through a graph node of its own. Its gradients are summed there before they
        are added to those of other phases, so a cut between phases changes no bit.
        """
        x_TD = sent.x_TD
        routing = sent.routing
        batch = sent.batch
        shared_TD = None if self._shared is None else self._shared(x_TD.view_as(x_TD), batch)
        rows, handle = self._arrive(sent.pending, x_TD, routing.weights_TK)
        if self.first_expert is not None and batch.keys_T is not None:
            rows = with_keys(
                rows,
                handle,
                keys_T=batch.own(batch.keys_T),
                weights_TK=routing.weights_TK,
                dispatcher=self.dispatcher,
                first_expert=self.first_expert,
            )
        return Received(
            rows=rows,
            handle=handle,
            shared_TD=shared_TD,
            routing=routing,
            dropless=batch.dropless,
            beside=sent.beside,
        )

    def compute(self, received: Received) -> Returning:
        """Run the routed experts, and start the combine."""
        rows = received.rows
        routing = received.routing
        stats_of_rows: Mapping[str, Tensor] = rows.stats
        if self.budgeted and not received.dropless:
            static_rows = StaticRows(rows)
            with forward_with(static_rows=static_rows):
                rows_RD = self._experts(rows)
            stats_of_rows = static_rows.stats  # with what memory policies have reported
        else:
            rows_RD = self._experts(rows)
        layer_stats = LayerStats(
            stats={**routing.stats, **stats_of_rows} if stats_of_rows else routing.stats,
            aux_losses=routing.aux_losses,
            expert_ids_TK=routing.expert_ids_TK if routing.choices_TK is None else routing.choices_TK,
        )
        pending = self.dispatcher.start_combine(rows_RD, received.handle)
        return Returning(pending=pending, shared_TD=received.shared_TD, stats=layer_stats, beside=received.beside)

    def collect(self, returning: Returning) -> Tensor:
        """Finish the combine, and return ``out_TD``, the output of the shared expert added."""
        out_TD = self.dispatcher.finish_combine(returning.pending)
        return out_TD if returning.shared_TD is None else out_TD + returning.shared_TD

    def _finish_dispatch(self, pending: Pending[Any], x_TD: Tensor, weights_TK: Tensor) -> tuple[ExpertBatch, Any]:
        """Finish a dispatch. A policy keeps the tokens and weights, from which it dispatches again."""
        return self.dispatcher.finish_dispatch(pending)

    def _dispatch_again(self, handle: Any, x_TD: Tensor, weights_TK: Tensor) -> ExpertBatch:
        batch, _ = self.dispatcher.redispatch(x_TD, weights_TK, handle)
        return batch


def _with_entropy(routing: Routing, mask_T: Tensor | None) -> Routing:
    """Routing with the entropy of its scores among the statistics, if it gives scores and does not tell it itself."""
    if routing.scores_TE is None or ROUTER_ENTROPY in routing.stats:
        return routing
    entropy = entropy_of_scores(routing.scores_TE, mask_T)
    return replace(routing, stats={**routing.stats, ROUTER_ENTROPY: entropy})
