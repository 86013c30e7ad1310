"""The router that forces an even load."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moefw.core.contracts import Router
from moefw.core.site import Site
from moefw.core.stages import Batch, Routing
from moefw_kernels.routing import count_choices

if TYPE_CHECKING:
    from moefw.plugins.routers.forced import Forced


@final
class ForcedRouter(nn.Module, Router):
    """Weight ``(E, D)``, which only gives weights their gradients; no state."""

    def __init__(self, site: Site, options: Forced) -> None:
        super().__init__()
        dims = site.dims
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.model_dim))
        self._num_experts, self._top_k = dims.num_experts, dims.top_k
        self._known_counts = options.known_counts

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Return the routing of the tokens; masked tokens go nowhere, and their turns are lost."""
        logits_TE = linear(x_TD.float(), self.weight.float())
        choices = len(x_TD) * self._top_k
        ids_TK = torch.arange(choices, device=x_TD.device).remainder_(self._num_experts).view(-1, self._top_k)
        weights_TK = logits_TE.gather(1, ids_TK).softmax(-1)
        mask_T = batch.mask_T
        if mask_T is not None:
            absent_T1 = ~mask_T.unsqueeze(-1)
            ids_TK, weights_TK = ids_TK.masked_fill(absent_T1, -1), weights_TK.masked_fill(absent_T1, 0.0)
        known = self._known_counts and self.training and mask_T is None
        return Routing(
            expert_ids_TK=ids_TK,
            weights_TK=weights_TK,
            stats={"tokens_per_expert": count_choices(ids_TK, self._num_experts)},
            counts_host=self._counts(choices) if known else None,
        )

    def _counts(self, choices: int) -> tuple[int, ...]:
        each, more = divmod(choices, self._num_experts)
        return (each + 1,) * more + (each,) * (self._num_experts - more)
