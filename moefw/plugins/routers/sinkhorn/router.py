"""The Sinkhorn router (as in Megatron Core, notes 1.1; Sinkhorn and Knopp 1967)."""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Router
from moefw.core.site import Site
from moefw.core.stages import Batch, Routing
from moefw.runtime.compute.aux_loss import attach
from moefw.runtime.compute.product import wide_linear
from moefw.runtime.parallel.shared_tokens import ALONE, TokenGroups, WholeMicroBatch
from moefw_kernels.devices import on_host, runs_ahead
from moefw_kernels.routing import count_choices, z_loss

SETTLED: Final = 1e-4
"""Mean change of the experts' scales in one round below which they have converged."""
NOT_ZERO: Final = 1e-8
BETWEEN_READS: Final = 8
"""Rounds after which a host that runs ahead of its device reads whether the scales have converged."""


@final
class SinkhornRouter(nn.Module, Router):
    """Weight ``(E, D)``; no state. Balances in training. In evaluation, a token's experts are those of its best scores.

    A plan depends on all tokens of a micro-batch, including later ones, so evaluation must not use it. The ranks in
    ``groups`` share a micro-batch.
    """

    def __init__(self, site: Site, *, max_rounds: int, z_loss: float, dtype: str, groups: TokenGroups = ALONE) -> None:
        super().__init__()
        dims = site.dims
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.model_dim))
        self._layer = site.layer
        self._num_experts = dims.num_experts
        self._top_k = dims.top_k
        self._max_rounds = max_rounds
        self._z_coeff = z_loss
        self._dtype = {"fp32": torch.float32, "fp64": torch.float64}[dtype]
        self._groups = groups

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Routing of the tokens; masked tokens are not routed, not counted, and do not affect scaling."""
        mask_T = batch.mask_T
        logits_TE = wide_linear(x_TD, self.weight, self._dtype)
        scores_TE = logits_TE.sigmoid() if self._top_k == 1 else logits_TE.softmax(-1)
        given_TK = batch.route(self._layer, len(x_TD), self._top_k)
        ids_TK = given_TK
        if ids_TK is None:
            chosen_by_TE = self._plan(logits_TE, batch) if self.training else logits_TE
            ids_TK = chosen_by_TE.topk(self._top_k).indices
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
        weights_TK = scores_TE.gather(1, ids_TK.clamp_min(0)).masked_fill(ids_TK < 0, 0.0).float()
        aux_losses = {}
        if self._z_coeff:
            valid_T = logits_TE.new_ones(len(x_TD)) if mask_T is None else mask_T.to(logits_TE.dtype)
            loss = self._z_coeff * z_loss(logits_TE, valid_T)
            aux_losses["z_loss"] = loss.detach()
            if self.training and batch.aux_scale is not None:
                weights_TK = attach(weights_TK, loss * batch.aux_scale)
        return Routing(
            expert_ids_TK=ids_TK,
            weights_TK=weights_TK,
            scores_TE=scores_TE,
            stats={"tokens_per_expert": count_choices(ids_TK, self._num_experts)},
            aux_losses=aux_losses,
            num_rows=ids_TK.numel() if mask_T is None and given_TK is None else None,
        )

    def _plan(self, logits_TE: Tensor, batch: Batch) -> Tensor:
        """This rank's rows of the transport plan of the micro-batch."""
        mask_T = batch.mask_T
        whole = WholeMicroBatch(batch, len(logits_TE), self._groups[batch.cp])
        mask_N = None if mask_T is None else whole.of(mask_T)
        return whole.own(balanced(whole.of(logits_TE), mask_N, self._max_rounds))


@torch.no_grad()
def balanced(logits_TE: Tensor, mask_T: Tensor | None, max_rounds: int) -> Tensor:
    """Transport plan ``d0 * exp(logits) * d1`` (T, E), by which experts are chosen.

    From ``d1 = 1``: ``d0_i = 1 / (N (sum_j d1_j c_ij + 1e-8))`` over N valid tokens, ``d1_j = 1 / (E (sum_i d0_i c_ij
    + 1e-8))``, until d1 changes by less than 1e-4 in the mean. Rows of c are exp(l - max l): exp cannot overflow, and
    d0 absorbs a row's factor. Rounds that run until the host reads that they are not needed change nothing.
    """
    num_tokens, num_experts = logits_TE.shape
    cost_TE = (logits_TE - logits_TE.amax(-1, keepdim=True)).exp()
    rows_T = logits_TE.new_full((num_tokens,), 1.0 / max(1, num_tokens))
    if mask_T is not None:
        rows_T = mask_T.to(logits_TE.dtype) / mask_T.sum().clamp_min(1)
    d0_T = rows_T
    d1_E = logits_TE.new_ones(num_experts)
    settled = torch.zeros((), dtype=torch.bool, device=d1_E.device)
    each = BETWEEN_READS if runs_ahead(d1_E.device) else 1
    for number in range(1, max_rounds + 1):
        next_T = rows_T / (cost_TE @ d1_E + NOT_ZERO)
        next_E = 1.0 / (num_experts * (next_T @ cost_TE + NOT_ZERO))
        settles = settled | ((next_E - d1_E).abs().mean() < SETTLED)
        d0_T = d0_T.where(settled, next_T)
        d1_E = d1_E.where(settled, next_E)
        settled = settles
        if number % each == 0 and on_host(settled)[0]:
            break
    return d1_E * cost_TE * d0_T.unsqueeze(-1)
