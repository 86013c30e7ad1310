"""The top-k router, composed of small parts when it is built.

``x_TD -> jitter -> logits -> choice (or replay) and weights -> capacity -> losses -> Routing``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Router
from moefw.core.errors import ContractError
from moefw.core.records import State
from moefw.core.site import Site
from moefw.core.stages import Batch, Routing
from moefw.plugins.routers.topk.capacity import Limit
from moefw.plugins.routers.topk.losses import CHOICES, LOAD, Losses, Pooled
from moefw.plugins.routers.topk.options import Options
from moefw.plugins.routers.topk.selection import BelowQuantile, Stats, next_quantile
from moefw.runtime.compute.aux_loss import attach
from moefw.runtime.compute.product import wide_linear
from moefw.runtime.parallel.shared_tokens import ALONE, TokenGroups
from moefw.runtime.router_entropy import ROUTER_ENTROPY
from moefw_kernels.random import token_keys, uniform
from moefw_kernels.routing import Chosen, Gating, route, route_to

BIAS = "expert_bias"
"""State (E) of the rule ``expert_bias``."""
BETA = "quantile_beta"
"""State (E) of the rule ``quantile``."""


@final
class TopKRouter(nn.Module, Router):
    """Weight ``(E, D)`` and, as an option, bias ``(E)``.

    State (E) for each rule that has one: ``expert_bias``, ``quantile_beta``, ``global_load``.

    ``stats["tokens_per_expert"]`` counts choices before a capacity drops any, as balance requires.
    """

    def __init__(self, site: Site, options: Options, token_groups: TokenGroups = ALONE) -> None:
        super().__init__()
        dims = site.dims
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.model_dim))
        self.bias = nn.Parameter(torch.empty(dims.num_experts)) if options.bias else None
        self.rules = {rule.kind: rule for rule in options.balance}
        self._layer = site.layer
        self._num_experts = dims.num_experts
        self._dtype = torch.float64 if options.dtype == "fp64" else torch.float32
        self._jitter = options.jitter
        groups = None
        if options.groups is not None:
            best = options.groups.best or dims.top_k // options.groups.keep
            groups = (options.groups.count, options.groups.keep, best)
        has_losses = not self.rules.keys() <= {"expert_bias", "quantile"}
        self._gating = Gating(
            k=dims.top_k,
            score=options.score,
            pre_softmax=bool(options.pre_softmax),
            renormalise=options.score != "softmax" and options.renormalised(dims.top_k),
            scale=options.scale,
            groups=groups,
            needs_scores=has_losses,
        )
        self._quantile = BelowQuantile(dims, token_groups) if "quantile" in self.rules else None
        self._limit = None if options.capacity is None else Limit(options.capacity, dims, token_groups)
        self._losses = None
        if has_losses:
            self._losses = Losses(options.balance, self._gating, token_groups)
        self._keep_state()

    def _keep_state(self) -> None:
        """Register the state of each rule that has one. ``_bias`` is the name of the state that biases choices."""
        experts = self._num_experts
        self._bias: str | None = None
        if "quantile" in self.rules:
            self._bias = BETA
        elif "expert_bias" in self.rules:
            self._bias = BIAS
        self._states: tuple[State, ...] = ()
        if self._bias is not None:
            self._states = (State(self._bias, (experts,)),)
            self.register_buffer(self._bias, torch.zeros(experts), persistent=False)
        self._keeps_load = self._losses is not None and self._losses.keeps_load
        if self._keeps_load:
            self._states += (State(LOAD, (experts,)),)
            self.register_buffer(LOAD, torch.ones(experts), persistent=False)

    def state_spec(self) -> Sequence[State]:
        """Bias of choices and the load that a loss reads, if there are any."""
        return self._states

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Routing of the tokens; masked tokens are not routed and not counted."""
        mask_T = batch.mask_T
        logits_TE = self._logits(x_TD, batch)
        bias_E = None if self._bias is None else getattr(self, self._bias)
        # (T, E) -> (T, K). Choices of an earlier forward are replayed; -1 among them is none.
        given_TK = None if batch.routes is None else batch.route(self._layer, len(x_TD), self._gating.k)
        stats: Stats = {}
        if self._quantile is None and given_TK is None:
            chosen = route(logits_TE, self._gating, bias_E, mask_T)
        else:
            chosen, stats = self._route_to(given_TK, logits_TE, bias_E, batch)
        ids_TK = chosen.ids_TK
        weights_TK = chosen.weights_TK
        stats["tokens_per_expert"] = chosen.counts_E
        if chosen.entropy is not None and self.training:
            stats[ROUTER_ENTROPY] = chosen.entropy
        choices_TK: Tensor | None = None
        capacity: int | None = None
        if self._limit is not None:
            choices_TK = ids_TK
            ids_TK, weights_TK, capacity = self._drop(ids_TK, weights_TK, stats, batch)
        has_dropped = choices_TK is not None and choices_TK is not ids_TK
        all_kept = mask_T is None and given_TK is None and not has_dropped
        is_plain = bias_E is None and given_TK is None and self._gating.groups is None
        losses, pooled = self._balance(logits_TE, chosen, stats, batch, is_plain=is_plain)
        if self.training and batch.aux_scale is not None and losses:
            weights_TK = attach(weights_TK, reduce(add, losses.values()) * batch.aux_scale)
        return Routing(
            expert_ids_TK=ids_TK,
            weights_TK=weights_TK,
            scores_TE=chosen.scores_TE,
            stats=stats,
            aux_losses={name: loss.detach() for name, loss in losses.items()},
            pooled=pooled if self.training else {},
            choices_TK=choices_TK,
            capacity=capacity,
            num_rows=ids_TK.numel() if all_kept else None,
        )

    def over_layers(self, pooled: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Balance loss over the tokens of all layers, if there is one."""
        if self._losses is None:
            return {}
        return self._losses.over_layers(pooled)

    def _logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Logits of all experts, ``(T, E)``, of tokens with jitter if there is any."""
        if self._jitter and self.training:
            x_TD = jittered(x_TD.to(self._dtype), batch, self._jitter, self._layer)
        logits_TE = wide_linear(x_TD, self.weight, self._dtype)
        return logits_TE if self.bias is None else logits_TE + self.bias.to(self._dtype)

    def _route_to(
        self, given_TK: Tensor | None, logits_TE: Tensor, bias_E: Tensor | None, batch: Batch
    ) -> tuple[Chosen, Stats]:
        """Routing to replayed experts, or else to those that the quantile chooses, and its statistics."""
        mask_T = batch.mask_T
        stats: Stats = {}
        if self._quantile is not None:
            ids_TK, stats = self._quantile(logits_TE, bias_E, batch)
        if given_TK is None:
            return route_to(ids_TK, logits_TE, self._gating, mask_T), stats
        # A dropped choice gets some valid id, as ``route_to`` takes it.
        return route_to(given_TK.clamp_min(0), logits_TE, self._gating, mask_T, given_TK < 0), stats

    def _drop(
        self, ids_TK: Tensor, weights_TK: Tensor, stats: Stats, batch: Batch
    ) -> tuple[Tensor, Tensor, int | None]:
        """Ids and weights of the kept choices, and the size to pad groups to. Adds ``dropped_choices`` to stats.

        The very same ids if all are kept, as in dropless evaluation and generation.
        """
        limit = self._limit
        assert limit is not None
        is_dropless = batch.dropless and not self.training
        kept_TK = None if is_dropless else limit.kept(ids_TK, weights_TK, batch)
        if kept_TK is None:
            stats["dropped_choices"] = stats["tokens_per_expert"].new_zeros(())
        else:
            stats["dropped_choices"] = stats["tokens_per_expert"].sum() - kept_TK.sum()
            ids_TK = ids_TK.masked_fill(~kept_TK, -1)
            weights_TK = weights_TK.masked_fill(~kept_TK, 0.0)
        if not limit.pad:
            return ids_TK, weights_TK, None
        num_tokens = len(ids_TK)
        return ids_TK, weights_TK, num_tokens if is_dropless else limit.of(num_tokens)

    def _balance(
        self, logits_TE: Tensor, chosen: Chosen, stats: Stats, batch: Batch, *, is_plain: bool
    ) -> tuple[Mapping[str, Tensor], Pooled]:
        """Balance losses by name, and what layers pool. Adds what the losses count to stats.

        They count the plain top-k, whatever bias, groups or capacity change of it: ``is_plain`` says that it is chosen.
        """
        if self._losses is None:
            return {}, {}
        plain_TK = chosen.ids_TK if is_plain else None
        load_E = getattr(self, LOAD) if self._keeps_load else None
        losses, seen, pooled = self._losses(logits_TE, chosen.scores_TE, plain_TK, batch.mask_T, batch, load_E)
        stats |= seen
        return losses, pooled

    @torch.no_grad()
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        """Advance each rule's state from the sums over the global batch.

        ``bias += rate * sign(mean load - load)`` (DeepSeek-V3, arXiv 2412.19437 section 2.1.2); for the quantile's
        beta see :func:`next_quantile`. The load is the share of plain top-k choices, 1 = fair, kept if there were none.
        """
        if "expert_bias" in self.rules:
            counts_E = reduced["tokens_per_expert"]
            bias_E = self.get_buffer(BIAS)
            bias_E += self.rules["expert_bias"].option("rate") * torch.sign(counts_E.mean() - counts_E)
        if "quantile" in self.rules:
            beta_E = self.get_buffer(BETA)
            beta_E.copy_(next_quantile(beta_E, reduced, self.rules["quantile"].option("ema")))
        if self._keeps_load:
            choices_E = reduced[CHOICES]
            load_E = self.get_buffer(LOAD)
            new_load_E = choices_E / choices_E.mean().clamp_min(1e-9)
            load_E.copy_(torch.where(choices_E.sum() > 0, new_load_E, load_E))


def jittered(x_TD: Tensor, batch: Batch, eps: float, layer: int) -> Tensor:
    """``x * U(1-eps, 1+eps)``, drawn for (sequence seed, position, feature, layer); ``x`` without seeds."""
    draws = batch.draws
    if draws is None:
        return x_TD
    keys_T = batch.own(token_keys(*draws, salt=layer))
    if len(keys_T) != len(x_TD):
        what = f"a router with jitter got {len(x_TD)} tokens, and the batch has {len(keys_T)} for this rank."
        raise ContractError(what, "Hand the tokens of the batch to the router, or set its part.")
    drawn_TD = uniform(keys_T, x_TD.shape[1])
    return x_TD * (1.0 + eps * (2.0 * drawn_TD - 1.0)).to(x_TD.dtype)
