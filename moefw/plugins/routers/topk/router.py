"""The top-k router. Score arithmetic is fp32 whatever the precision recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Router, State
from moefw.core.site import Dims
from moefw.core.stages import Batch, Routing

if TYPE_CHECKING:
    from moefw.plugins.routers.topk import TopK


@final
class TopKRouter(nn.Module, Router):
    """Weight ``(E, D)``; state ``expert_bias`` (E) if the balance asks for it."""

    expert_bias: Tensor

    def __init__(self, dims: Dims, options: TopK) -> None:
        super().__init__()
        self.dims, self.options = dims, options
        self.rules = {rule.kind: rule for rule in options.balance}
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.model_dim))
        if "expert_bias" in self.rules:
            self.register_buffer("expert_bias", torch.zeros(dims.num_experts), persistent=False)

    def state_spec(self) -> Sequence[State]:
        """The bias, if there is one."""
        return (State("expert_bias", (self.dims.num_experts,)),) if "expert_bias" in self.rules else ()

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        """Return the routing of the tokens; masked tokens go nowhere and count nowhere."""
        logits_TE = torch.nn.functional.linear(x_TD.float(), self.weight.float())
        scores_TE = logits_TE.sigmoid() if self.options.score == "sigmoid" else logits_TE.softmax(-1)
        ids_TK, weights_TK = self._choose(logits_TE, scores_TE)
        mask_T = batch.mask_T
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
            weights_TK = weights_TK * mask_T.unsqueeze(-1)
        counts_E = _count(ids_TK, self.dims.num_experts)
        aux_losses = self._aux_losses(logits_TE, scores_TE, mask_T)
        if self.training and batch.loss_scale is not None:
            for loss in aux_losses.values():
                weights_TK = _Attach.apply(weights_TK, loss * batch.loss_scale)  # type: ignore[no-untyped-call]
        return Routing(
            expert_ids_TK=ids_TK,
            weights_TK=weights_TK,
            scores_TE=scores_TE,
            stats={"tokens_per_expert": counts_E},
            aux_losses={name: loss.detach() for name, loss in aux_losses.items()},
        )

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        k = self.dims.top_k
        if self.options.score == "softmax":
            chosen_TK, ids_TK = logits_TE.topk(k)
            return ids_TK, chosen_TK.softmax(-1) * self.options.scale
        biased_TE = scores_TE + self.expert_bias if "expert_bias" in self.rules else scores_TE
        ids_TK = biased_TE.topk(k).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.options.renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return ids_TK, weights_TK * self.options.scale

    def _aux_losses(self, logits_TE: Tensor, scores_TE: Tensor, mask_T: Tensor | None) -> dict[str, Tensor]:
        """Return each loss times its coefficient and the number of valid tokens.

        aux_loss: ``coeff * E / (K * N^2) * sum_e (sum_x s_xe) * n_e`` over the micro-batch of N tokens, s the scores
        normalised over all experts, n_e the tokens whose plain top-k of s holds e (Switch, arXiv 2101.03961 eq. 4).
        z_loss: ``coeff * mean(logsumexp(logits)^2)`` (ST-MoE, arXiv 2202.08906 eq. 5).
        """
        losses: dict[str, Tensor] = {}
        if self.rules.keys() <= {"expert_bias"}:
            return losses
        valid_T = torch.ones_like(logits_TE[:, 0]) if mask_T is None else mask_T.to(logits_TE.dtype)
        rule = self.rules.get("aux_loss")
        if rule:
            shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
            ids_TK = scores_TE.topk(self.dims.top_k).indices
            if mask_T is not None:
                ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
            counts_E = _count(ids_TK, self.dims.num_experts)
            tokens = valid_T.sum().clamp_min(1)
            mass_E = (shares_TE * valid_T.unsqueeze(-1)).sum(0)
            losses["aux_loss"] = rule.coeff * self.dims.num_experts / self.dims.top_k * (mass_E @ counts_E) / tokens
        rule = self.rules.get("z_loss")
        if rule:
            losses["z_loss"] = rule.coeff * (logits_TE.logsumexp(-1).square() * valid_T).sum()
        return losses

    @torch.no_grad()
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        """``bias += rate * sign(mean load - load)`` (DeepSeek-V3, arXiv 2412.19437 section 2.1.2)."""
        rule = self.rules.get("expert_bias")
        if rule:
            load_E = reduced["tokens_per_expert"]
            self.expert_bias += rule.rate * torch.sign(load_E.mean() - load_E)


def _count(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen, fp32, without asking the device; -1 is not counted."""
    slots = torch.zeros(num_experts + 1, dtype=torch.float32, device=ids_TK.device)
    flat = ids_TK.flatten() + 1
    return slots.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))[1:]


class _Attach(torch.autograd.Function):
    """Hand ``weights_TK`` through, and give the loss a gradient of 1 when backward passes by."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, loss: Tensor) -> Tensor:
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, Tensor]:
        return grad_TK, torch.ones((), dtype=torch.float32, device=grad_TK.device)
