"""Auxiliary losses of balance rules: sums over valid tokens, so any split of the global batch gives the same total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.core.stages import Batch
from moefw.plugins.routers.topk.options import OVER_MODEL, Balance
from moefw.runtime.parallel.shared_tokens import ALONE, TokenGroups
from moefw_kernels.routing import Gating, Segments, switch_loss, token_sums

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


def segments_of(level: str, batch: Batch, num_tokens: int) -> Segments | None:
    """Segments of tokens that a level balances. None: all tokens, whose mass need not be added up in order."""
    if level == "sequence":
        return sequences(batch, num_tokens)
    if level == "micro_batch":
        return Segments(1)
    return None


def sequences(batch: Batch, num_tokens: int) -> Segments:
    """Segment for each sequence. Raises ContractError if the tokens are not those of the batch."""
    count = len(batch.lengths or batch.ids_BS)
    if batch.lengths is None and batch.part is None and num_tokens == batch.ids_BS.numel():
        return Segments(count)
    segment_T = batch.sequence_T
    if len(segment_T) != num_tokens:
        what = f"a balance over sequences got {num_tokens} tokens; the batch has {len(segment_T)} for this rank."
        raise ContractError(what, "Hand the tokens of the batch to the router, or set its part.")
    return Segments(count, None if count == 1 else segment_T)


def load_loss(mass_E: Tensor, load_E: Tensor) -> Tensor:
    """Loss against the load of the last whole global batch (uniform before the first).

    One step late, on purpose: nothing is exchanged in forward, and no split of the batch changes it. It is the Switch
    loss with counts from elsewhere.
    """
    return (mass_E * load_E).sum()


def over_model(layers: Sequence[Pooled]) -> Tensor:
    """Load-balancing loss over the tokens of all layers together, times the valid tokens.

    It is this rank's part of the loss, from its masses and the counts of all ranks.

    ``E sum_e n_e mass_e / N^2`` over the N rows of all layers, as ``load_balancing_loss_func`` of ``transformers`` has
    it: K if experts are equally loaded, where the other levels are 1.
    """
    mass_E = torch.stack([layer["mass_E"] for layer in layers]).sum(0)
    seen_X = torch.stack([layer["seen_X"] for layer in layers]).sum(0)
    return (mass_E * seen_X[:-1]).sum() * (len(mass_E) / len(layers)) / seen_X[-1].clamp_min(1)


@final
class Losses:
    """All losses of one router, whose ``gating`` says how many experts a token chooses by which score.

    The counts of the ranks in ``groups`` are added up.
    """

    def __init__(self, rules: Sequence[Balance], gating: Gating, groups: TokenGroups = ALONE) -> None:
        aux = [rule for rule in rules if rule.kind == "aux_loss"]
        self.levels: tuple[tuple[str, float], ...] = tuple((rule.option("over"), rule.option("coeff")) for rule in aux)
        self.keeps_load = "global_batch" in dict(self.levels)
        self.over_model = next((rule.option("coeff") for rule in aux if rule.level == OVER_MODEL), None)
        self.z_coeff = next((rule.option("coeff") for rule in rules if rule.kind == "z_loss"), None)
        self._gating = gating
        self._groups = groups

    def __call__(
        self,
        logits_TE: Tensor,
        scores_TE: Tensor | None,
        ids_TK: Tensor | None,
        mask_T: Tensor | None,
        batch: Batch,
        load_E: Tensor | None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Pooled]:
        """Each loss by name (coefficient times mean times valid tokens), statistics, and what layers pool.

        ``ids_TK`` are the plain top-k of the valid tokens if the router has chosen those.
        """
        over = [segments_of(level, batch, len(logits_TE)) for level, _ in self.levels]
        sums, z = token_sums(
            logits_TE,
            self._gating,
            over,
            scores_TE=scores_TE,
            ids_TK=ids_TK,
            mask_T=mask_T,
            z_coeff=self.z_coeff,
        )
        losses: dict[str, Tensor] = {}
        stats: dict[str, Tensor] = {}
        pool: Pooled = {}
        for (level, coeff), (mass_GE, seen_GX) in zip(self.levels, sums, strict=True):
            if level == "global_batch":
                assert load_E is not None
                stats[CHOICES] = seen_GX[0, :-1]
                losses[NAMES[level]] = coeff * load_loss(mass_GE.squeeze(0), load_E)
                continue
            self._add_up(seen_GX, batch)
            if level == "model":
                pool = {"mass_E": mass_GE.squeeze(0), "seen_X": seen_GX.squeeze(0)}
            else:
                losses[NAMES[level]] = switch_loss(mass_GE, seen_GX, self._gating.k, coeff)
        if z is not None:
            losses["z_loss"] = z
        return losses, stats, pool

    def _add_up(self, seen_GX: Tensor, batch: Batch) -> None:
        """Add up the counts of the ranks that share the tokens, in place. They have no gradient; masses stay local."""
        group = self._groups[batch.cp]
        if group is not None:
            dist.all_reduce(seen_GX, group=group)

    def over_layers(self, layers: Sequence[Pooled]) -> dict[str, Tensor]:
        """Loss over all layers by name, if there is one."""
        if self.over_model is None:
            return {}
        return {NAMES["model"]: self.over_model * over_model(layers)}
