"""The router that forces an even load."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Router
from moefw.core.site import Site
from moefw.core.stages import Batch, Routing
from moefw.runtime.compute.product import wide_linear
from moefw_kernels.routing import count_choices


@final
class ForcedRouter(nn.Module, Router):
    """Weight ``(E, D)``, which affects routing weights but not choices; no state."""

    def __init__(self, site: Site, *, known_counts: bool) -> None:
        super().__init__()
        dims = site.dims
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.model_dim))
        self._layer, self._num_experts, self._top_k = site.layer, dims.num_experts, dims.top_k
        self._known_counts = known_counts

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Return the routing of the tokens; masked tokens are not routed, and no other token takes their turns."""
        logits_TE = wide_linear(x_TD, self.weight, torch.float32)
        choices = len(x_TD) * self._top_k
        recorded_TK = batch.route(self._layer, len(x_TD), self._top_k)
        ids_TK = self._in_turn(choices, x_TD.device) if recorded_TK is None else recorded_TK
        mask_T = batch.mask_T
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
        weights_TK = logits_TE.gather(1, ids_TK.clamp_min(0)).softmax(-1).masked_fill(ids_TK < 0, 0.0)
        all_kept = mask_T is None and recorded_TK is None
        same = batch.lengths is None and all_kept
        return Routing(
            expert_ids_TK=ids_TK,
            weights_TK=weights_TK,
            stats={"tokens_per_expert": count_choices(ids_TK, self._num_experts)},
            counts_host=self._counts(choices) if self._known_counts and self.training and same else None,
            num_rows=choices if all_kept else None,
        )

    def _in_turn(self, choices: int, device: torch.device) -> Tensor:
        return torch.arange(choices, device=device).remainder_(self._num_experts).view(-1, self._top_k)

    def _counts(self, choices: int) -> tuple[int, ...]:
        each, more = divmod(choices, self._num_experts)
        return (each + 1,) * more + (each,) * (self._num_experts - more)
