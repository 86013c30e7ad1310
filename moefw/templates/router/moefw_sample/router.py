"""The runtime part of ``sample``. Shapes: legend in :mod:`moefw.core.stages`."""

from __future__ import annotations

from typing import final

import moefw
import torch
from moefw_kernels.routing import count_choices
from torch import Tensor, nn
from torch.nn.functional import linear


@final
class SampleRouter(nn.Module, moefw.Router):
    """Weight ``(E, D)``; no state. Forward writes nothing: statistics are returned."""

    def __init__(self, site: moefw.Site, *, temperature: float) -> None:
        super().__init__()
        dims = site.dims
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.model_dim))
        self._layer = site.layer
        self._num_experts = dims.num_experts
        self._top_k = dims.top_k
        self._temperature = temperature

    def forward(self, x_TD: Tensor, batch: moefw.Batch) -> moefw.Routing:
        """Routing of the tokens; masked tokens are neither sent nor counted."""
        logits_TE = linear(x_TD.float(), self.weight.float()) / self._temperature
        scores_TE = logits_TE.softmax(-1)
        ids_TK = batch.route(self._layer, len(x_TD), self._top_k)
        if ids_TK is None:
            ids_TK = scores_TE.topk(self._top_k).indices
        mask_T = batch.mask_T
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
        weights_TK = scores_TE.gather(1, ids_TK.clamp_min(0)).masked_fill(ids_TK < 0, 0.0)
        return moefw.Routing(
            expert_ids_TK=ids_TK,
            weights_TK=weights_TK,
            scores_TE=scores_TE,
            stats={"tokens_per_expert": count_choices(ids_TK, self._num_experts)},
        )
