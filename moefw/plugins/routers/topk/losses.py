"""Auxiliary losses of balance rules: sums over valid tokens, so any split of the global batch gives the same total."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.core.site import Dims
from moefw.core.stages import Batch
from moefw.plugins.routers.topk.options import OVER_MODEL, Balance
from moefw.plugins.routers.topk.token_groups import ALONE, TokenGroups
from moefw_kernels.routing import count_choices, load_loss, switch_loss, z_loss

LOAD = "global_load"
"""State (E): each expert's plain top-k choices in the last whole global batch, 1 = fair."""
CHOICES = "global_choices"
"""The statistic from which the load is computed."""
NAMES = {
    "micro_batch": "aux_loss",
    "sequence": "sequence_aux_loss",
    "global_batch": "global_aux_loss",
    "model": "model_aux_loss",
}
Pooled = Mapping[str, Tensor]
"""``mass_E``: the sum of probabilities of this rank's valid tokens, with a graph. ``seen_X``: how many tokens of the
micro-batch choose each expert, and how many there are, (E + 1)."""


class View(NamedTuple):
    """Inputs of balance losses: probabilities over experts, their plain top-k, and the valid tokens."""

    shares_TE: Tensor
    ids_TK: Tensor
    valid_T: Tensor
    batch: Batch
    load_E: Tensor | None
    add_up: Callable[[Tensor], object] | None


def over_micro_batch(view: View) -> Tensor:
    """Return the Switch loss over all tokens of the micro-batch."""
    row_T = view.ids_TK.new_zeros(len(view.ids_TK))
    return switch_loss(view.shares_TE, view.ids_TK, view.valid_T, row_T, 1, view.add_up)


def over_sequences(view: View) -> Tensor:
    """Return the Switch loss of each sequence, weighted by its valid tokens."""
    row_T, sequences = view.batch.sequence_T, len(view.batch.lengths or view.batch.ids_BS)
    if len(row_T) != len(view.shares_TE):
        what = f"a balance over sequences got {len(view.shares_TE)} tokens; the batch has {len(row_T)} for this rank."
        raise ContractError(what, "Hand the tokens of the batch to the router, or set its part.")
    return switch_loss(view.shares_TE, view.ids_TK, view.valid_T, row_T, sequences, view.add_up)


def over_global_batch(view: View) -> Tensor:
    """Return the loss against the load of the last whole global batch (uniform before the first).

    One step late, on purpose: nothing is exchanged in forward, and no split of the batch changes it.
    """
    assert view.load_E is not None
    return load_loss(view.shares_TE, view.valid_T, view.load_E)


def pooled(view: View) -> Pooled:
    """Return what :func:`over_model` needs of a layer."""
    seen_X = torch.cat([count_choices(view.ids_TK, view.shares_TE.shape[1]), view.valid_T.sum().float().view(1)])
    if view.add_up is not None:
        view.add_up(seen_X)
    return {"mass_E": (view.shares_TE * view.valid_T.unsqueeze(1)).sum(0), "seen_X": seen_X}


def over_model(layers: Sequence[Pooled]) -> Tensor:
    """Return the load-balancing loss over the tokens of all layers together, times the valid tokens: this rank's part.

    ``E sum_e n_e mass_e / N^2`` over the N rows of all layers, as ``load_balancing_loss_func`` of ``transformers`` has
    it: K if experts are equally loaded, where the other levels are 1.
    """
    mass_E = torch.stack([layer["mass_E"] for layer in layers]).sum(0)
    seen_X = torch.stack([layer["seen_X"] for layer in layers]).sum(0)
    return (mass_E * seen_X[:-1]).sum() * (len(mass_E) / len(layers)) / seen_X[-1].clamp_min(1)


LEVELS: dict[str, Callable[[View], Tensor]] = {
    "micro_batch": over_micro_batch,
    "sequence": over_sequences,
    "global_batch": over_global_batch,
}


@final
class Losses:
    """All losses of one router. The functions are chosen once.

    The counts of the ranks in ``groups`` are added up.
    """

    def __init__(self, rules: Sequence[Balance], dims: Dims, *, normalise: bool, groups: TokenGroups = ALONE) -> None:
        self.num_experts, self.top_k, self.normalise = dims.num_experts, dims.top_k, normalise
        pooling = [rule.option("coeff") for rule in rules if rule.level == OVER_MODEL]
        self.over_model = pooling[0] if pooling else None
        aux = [rule for rule in rules if rule.kind == "aux_loss" and rule.level != OVER_MODEL]
        self.levels = tuple((NAMES[r.option("over")], r.option("coeff"), LEVELS[r.option("over")]) for r in aux)
        self.keeps_load = "global_batch" in {rule.option("over") for rule in aux}
        self._groups = groups
        self.z_coeffs = tuple(rule.option("coeff") for rule in rules if rule.kind == "z_loss")

    def __call__(
        self, logits_TE: Tensor, scores_TE: Tensor, mask_T: Tensor | None, batch: Batch, load_E: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Pooled]:
        """Return each loss by name (coefficient times mean times valid tokens), statistics, and what layers pool."""
        valid_T = logits_TE.new_ones(len(logits_TE)) if mask_T is None else mask_T.to(logits_TE.dtype)
        losses: dict[str, Tensor] = {}
        stats: dict[str, Tensor] = {}
        pool: Pooled = {}
        if self.levels or self.over_model is not None:
            shares_TE = _shares(scores_TE) if self.normalise else scores_TE
            ids_TK = scores_TE.topk(self.top_k).indices
            if mask_T is not None:
                ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
            group = self._groups[batch.cp]
            add_up = None if group is None else partial(dist.all_reduce, group=group)
            view = View(shares_TE, ids_TK, valid_T, batch, load_E, add_up)
            losses = {name: coeff * level(view) for name, coeff, level in self.levels}
            if self.keeps_load:
                stats[CHOICES] = count_choices(ids_TK, self.num_experts)
            if self.over_model is not None:
                pool = pooled(view)
        for coeff in self.z_coeffs:
            losses["z_loss"] = coeff * z_loss(logits_TE, valid_T)
        return losses, stats, pool

    def over_layers(self, layers: Sequence[Pooled]) -> dict[str, Tensor]:
        """Return the loss over all layers by name, if there is one."""
        return {} if self.over_model is None else {NAMES["model"]: self.over_model * over_model(layers)}


def _shares(scores_TE: Tensor) -> Tensor:
    """Return scores that sum to 1. The clamp avoids only 0 / 0: under a larger one, small scores evade the loss."""
    return scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(torch.finfo(scores_TE.dtype).tiny)
