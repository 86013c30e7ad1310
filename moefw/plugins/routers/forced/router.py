"""The router that forces an even load."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Router
from moefw.core.site import Site
from moefw.core.stages import Batch, Routing
from moefw.runtime.compute.product import wide_linear
from moefw.runtime.parallel.shared_tokens import ALONE, TokenGroups, index_in_micro_batch, run_length
from moefw_kernels.routing import count_choices


@final
class ForcedRouter(nn.Module, Router):
    """Weight ``(E, D)``, which affects routing weights but not choices; no state.

    The ranks in ``groups`` share a micro-batch.
    """

    def __init__(self, site: Site, *, known_counts: bool, groups: TokenGroups = ALONE) -> None:
        super().__init__()
        dims = site.dims
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.model_dim))
        self._layer = site.layer
        self._num_experts = dims.num_experts
        self._top_k = dims.top_k
        self._known_counts = known_counts
        self._groups = groups

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Routing of the tokens; masked tokens are not routed, and no other token takes their turns."""
        logits_TE = wide_linear(x_TD, self.weight, torch.float32)
        given_TK = batch.route(self._layer, len(x_TD), self._top_k)
        ids_TK = self._in_turn(len(x_TD), batch) if given_TK is None else given_TK
        mask_T = batch.mask_T
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
        weights_TK = logits_TE.gather(1, ids_TK.clamp_min(0)).softmax(-1).masked_fill(ids_TK < 0, 0.0)
        all_kept = mask_T is None and given_TK is None
        return Routing(
            expert_ids_TK=ids_TK,
            weights_TK=weights_TK,
            stats={"tokens_per_expert": count_choices(ids_TK, self._num_experts)},
            counts_host=self._counts(len(x_TD), batch) if self._known_counts and self.training and all_kept else None,
            num_rows=ids_TK.numel() if all_kept else None,
        )

    def _in_turn(self, num_tokens: int, batch: Batch) -> Tensor:
        """Experts of each token, ``(T, K)``, by its place in the micro-batch."""
        index_T = index_in_micro_batch(batch, num_tokens, self._groups[batch.cp])
        choice_K = torch.arange(self._top_k, device=index_T.device)
        return (index_T.unsqueeze(1) * self._top_k + choice_K).remainder(self._num_experts)

    def _counts(self, num_tokens: int, batch: Batch) -> tuple[int, ...] | None:
        """How many choices each expert has on every rank; None if that may differ between ranks."""
        if batch.lengths is not None:
            return None
        is_shared = self._groups[batch.cp] is not None
        if is_shared and run_length(batch, num_tokens) * self._top_k % self._num_experts:
            return None
        each, more = divmod(num_tokens * self._top_k, self._num_experts)
        return (each + 1,) * more + (each,) * (self._num_experts - more)
