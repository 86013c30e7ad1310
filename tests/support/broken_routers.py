"""A plain router that keeps its contract, and routers that break it in one way each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor, nn

import moefw
from declared import declarations
from moefw.core.plugin import RouterPlugin
from moefw.core.records import State
from moefw.core.stages import Batch, Routing
from moefw.runtime.compute.aux_loss import attach


class PlainRouter(nn.Module, moefw.Router):
    """Softmax over the chosen logits, a z-loss, and a bias for the choice."""

    states: ClassVar[tuple[str, ...]] = ("bias",)
    partition: ClassVar[str] = "token"
    replays: ClassVar[Any] = ("never",)

    def __init__(self, site: moefw.Site) -> None:
        super().__init__()
        self.dims, self.layer = site.dims, site.layer
        self.weight = nn.Parameter(torch.empty(site.dims.num_experts, site.dims.model_dim))
        self.register_buffer("bias", torch.zeros(site.dims.num_experts), persistent=False)

    def state_spec(self) -> Sequence[State]:
        return [State(name, (self.dims.num_experts,)) for name in self.states]

    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        logits_TE = self.logits(x_TD.float(), batch)
        ids_TK = batch.route(self.layer, len(x_TD), self.dims.top_k)
        ids_TK = self.choose(logits_TE.detach()) if ids_TK is None else ids_TK
        mask_T = batch.mask_T
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(1), -1)
        counts_E = self.count(ids_TK)
        weights_TK = self.weigh(logits_TE, ids_TK)
        valid_T = logits_TE.new_ones(len(x_TD)) if mask_T is None else mask_T.float()
        loss = self.loss(logits_TE, valid_T)
        return Routing(
            expert_ids_TK=ids_TK,
            weights_TK=self.attached(weights_TK, loss, batch),
            stats={"tokens_per_expert": counts_E},
            aux_losses={"z_loss": loss.detach()},
        )

    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return x_TD @ self.weight.T

    def choose(self, logits_TE: Tensor) -> Tensor:
        return (logits_TE + self.bias).topk(self.dims.top_k).indices

    def count(self, ids_TK: Tensor) -> Tensor:
        return torch.bincount(ids_TK[ids_TK >= 0], minlength=self.dims.num_experts).float()

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = logits_TE.gather(1, ids_TK.clamp_min(0)).sigmoid()
        return weights_TK.masked_fill(ids_TK < 0, 0.0)

    def loss(self, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
        return 0.1 * (logits_TE.logsumexp(-1).square() * valid_T).sum()

    def attached(self, weights_TK: Tensor, loss: Tensor, batch: Batch) -> Tensor:
        if self.training and batch.aux_scale is not None:
            return attach(weights_TK, loss * batch.aux_scale)
        return weights_TK

    @torch.no_grad()
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        counts_E = reduced["tokens_per_expert"]
        self.bias += 0.01 * torch.sign(counts_E.mean() - counts_E)


@frozen
class Plain(RouterPlugin):
    name: ClassVar[str] = "plain"
    made: ClassVar[type[PlainRouter]] = PlainRouter

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(partition=(self.made.partition,), replays=self.made.replays)

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        return self.made(context.site)


@frozen
class NeedsAllExperts(Plain):
    """A token may go to all experts, as with expert choice."""

    name: ClassVar[str] = "needs-all-experts"

    def check(self, site: moefw.Site) -> Sequence[moefw.Problem]:
        if site.dims.top_k < site.dims.num_experts:
            return [moefw.Problem(f"top_k {site.dims.top_k} is less than all experts.", "Use more.")]
        return []


class InGroups(PlainRouter):
    """Chooses among the experts of the two best of four groups: right in every way."""

    kept: ClassVar[int] = 2

    def choose(self, logits_TE: Tensor) -> Tensor:
        scores_TE = logits_TE + self.bias
        scores_TGe = scores_TE.unflatten(1, (4, -1))
        kept_TG = torch.zeros(scores_TGe.shape[:2], dtype=torch.bool).scatter_(1, self.keep(scores_TGe), value=True)
        masked_TGe = scores_TGe.masked_fill(~kept_TG.unsqueeze(-1), -torch.inf)
        return masked_TGe.flatten(1).topk(self.dims.top_k).indices

    def keep(self, scores_TGe: Tensor) -> Tensor:
        return scores_TGe.amax(-1).topk(self.kept).indices


class KeepsOneGroupTooMany(InGroups):
    kept: ClassVar[int] = 3


class KeepsOneGroupTooFew(InGroups):
    kept: ClassVar[int] = 1


class KeepsTheFirstGroups(InGroups):
    def keep(self, scores_TGe: Tensor) -> Tensor:
        return torch.arange(self.kept).expand(len(scores_TGe), -1)


class CrowdsTheCrowded(PlainRouter):
    @torch.no_grad()
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        counts_E = reduced["tokens_per_expert"]
        self.bias -= 0.01 * torch.sign(counts_E.mean() - counts_E)


class WeighsWithTheBias(PlainRouter):
    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super().weigh(logits_TE + self.bias, ids_TK)


class WritesInForward(PlainRouter):
    def count(self, ids_TK: Tensor) -> Tensor:
        self.last_load = super().count(ids_TK)
        return self.last_load


class WeighsDroppedChoices(PlainRouter):
    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return logits_TE.gather(1, ids_TK.clamp_min(0)).sigmoid()


class LosesTheGradient(PlainRouter):
    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super().weigh(logits_TE.detach(), ids_TK)

    def loss(self, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
        return super().loss(logits_TE.detach(), valid_T)


class LosesTheTokens(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return super().logits(x_TD.detach(), batch)


class LooksAtOthers(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        logits_TE = super().logits(x_TD, batch)
        return logits_TE - logits_TE.mean(0) if len(x_TD) else logits_TE


class LooksAtThePlace(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        places_T = torch.arange(len(x_TD)) % batch.ids_BS.shape[1] if len(x_TD) else torch.zeros(0)
        return super().logits(x_TD, batch) * (1.0 + 0.2 * places_T.unsqueeze(1))


class LooksAtThePlaceInTheRow(PlainRouter):
    """Does not tell the sequences of a pack apart."""

    partition = "sequence"

    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        places_T = batch.own(batch.row_places.repeat(len(batch.ids_BS)))
        return super().logits(x_TD, batch) * (1.0 + 0.2 * places_T.unsqueeze(1))


class LosesByMicroBatch(PlainRouter):
    def loss(self, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
        mean_E = (logits_TE.softmax(-1) * valid_T.unsqueeze(1)).sum(0) / valid_T.sum().clamp_min(1)
        return valid_T.sum() * mean_E.square().sum()


class LooksAtItsPart(LooksAtOthers):
    partition = "micro_batch"


class CountsTheMask(PlainRouter):
    def count(self, ids_TK: Tensor) -> Tensor:
        return super().count(ids_TK.clamp_min(0))


class SendsTheMask(PlainRouter):
    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        return super().forward(x_TD, Batch(ids_BS=batch.ids_BS, labels_BS=batch.labels_BS, loss_scale=batch.loss_scale))


class AttachesTwice(PlainRouter):
    def attached(self, weights_TK: Tensor, loss: Tensor, batch: Batch) -> Tensor:
        return super().attached(super().attached(weights_TK, loss, batch), loss, batch)


class ScalesByTheLoss(PlainRouter):
    def attached(self, weights_TK: Tensor, loss: Tensor, batch: Batch) -> Tensor:
        return super().attached(weights_TK, loss, replace(batch, trained_share=None))


class AttachesUnscaled(PlainRouter):
    def attached(self, weights_TK: Tensor, loss: Tensor, batch: Batch) -> Tensor:
        return weights_TK if batch.loss_scale is None else attach(weights_TK, loss)


class DrawsByCall(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return super().logits(x_TD * (1.0 + 0.1 * torch.rand_like(x_TD)), batch)


class IsBornAtRandom(PlainRouter):
    def __init__(self, site: moefw.Site) -> None:
        super().__init__(site)
        self.register_buffer("offset", torch.rand(site.dims.num_experts), persistent=False)

    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return super().logits(x_TD, batch) + self.offset


class ForgetsReplay(PlainRouter):
    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        batch = Batch(
            ids_BS=batch.ids_BS, labels_BS=batch.labels_BS, mask_BS=batch.mask_BS, loss_scale=batch.loss_scale
        )
        return super().forward(x_TD, batch)


class ReplaysTheFirstLayer(PlainRouter):
    def __init__(self, site: moefw.Site) -> None:
        super().__init__(evolve(site, layer=0))


class TiesByChance(PlainRouter):
    def choose(self, logits_TE: Tensor) -> Tensor:
        """Adds noise that decides between equal scores alone."""
        return super().choose(logits_TE + 1e-9 * torch.rand_like(logits_TE))


class ScalesItsMetric(PlainRouter):
    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        routing = super().forward(x_TD, batch)
        scale = 1.0 if batch.loss_scale is None else batch.loss_scale
        return replace(routing, aux_losses={name: loss * scale for name, loss in routing.aux_losses.items()})


class HidesState(PlainRouter):
    states: ClassVar[tuple[str, ...]] = ()


class NamesStateThatIsNotThere(PlainRouter):
    states: ClassVar[tuple[str, ...]] = ("bias", "momentum")


class UpdatesByHabit(PlainRouter):
    """Updates depend on the amount routed so far, which is stored outside the module."""

    def count(self, ids_TK: Tensor) -> Tensor:
        _ROUTED[id(self)] = _ROUTED.get(id(self), 0) + len(ids_TK)
        return super().count(ids_TK)

    @torch.no_grad()
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        self.bias += 0.001 * _ROUTED.get(id(self), 0)


_ROUTED: dict[int, int] = {}


class DropsAndCountsAfterwards(PlainRouter):
    def choose(self, logits_TE: Tensor) -> Tensor:
        ids_TK = super().choose(logits_TE)
        return torch.where(ids_TK == 0, -1, ids_TK)


class ChoosesTwice(PlainRouter):
    def choose(self, logits_TE: Tensor) -> Tensor:
        return super().choose(logits_TE)[:, :1].expand(-1, self.dims.top_k)


class MasksTheChoiceBefore(PlainRouter):
    """Chooses one expert after another, and forgets all but the latest."""

    def choose(self, logits_TE: Tensor) -> Tensor:
        scores_TE = logits_TE + self.bias
        chosen = [scores_TE.argmax(1, keepdim=True)]
        while len(chosen) < self.dims.top_k:
            others_TE = scores_TE.scatter(1, chosen[-1], -torch.inf)
            chosen.append(others_TE.argmax(1, keepdim=True))
        return torch.cat(chosen, 1)


class ForgetsTheBatch(PlainRouter):
    def forward(self, x_TD: Tensor) -> Routing:  # type: ignore[override]
        return super().forward(x_TD, Batch(ids_BS=x_TD[:1], labels_BS=x_TD[:1]))


class MisspellsItsPartition(PlainRouter):
    partition = "tokens"


LOAD = torch.zeros(())


class CountsInItsModule(PlainRouter):
    def count(self, ids_TK: Tensor) -> Tensor:
        LOAD.add_(ids_TK.numel())
        return super().count(ids_TK)


class WeighsInHalf(PlainRouter):
    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super().weigh(logits_TE, ids_TK).bfloat16()


class DividesByNoTokens(PlainRouter):
    def loss(self, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
        return 0.1 * logits_TE.logsumexp(-1).square().mean() * len(valid_T)


class LeansOnTheRank(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return super().logits(x_TD, batch) * (1.0 + rank)


class CountsMaskedRows(PlainRouter):
    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        routing = super().forward(x_TD, batch)
        return replace(routing, num_rows=routing.expert_ids_TK.numel())


class Replays(PlainRouter):
    """Keeps its promise: it counts without a read."""

    replays = moefw.ANY

    def count(self, ids_TK: Tensor) -> Tensor:
        experts_E = torch.arange(self.dims.num_experts, device=ids_TK.device)
        return (ids_TK.unsqueeze(-1) == experts_E).sum((0, 1)).float()


class ReadsAValue(Replays):
    def loss(self, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
        return super().loss(logits_TE, valid_T) if valid_T.sum().item() else logits_TE.sum()


class CountsItsCalls(Replays):
    def __init__(self, site: moefw.Site) -> None:
        super().__init__(site)
        self.calls = 0

    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        self.calls += 1
        return super().logits(x_TD, batch) * (1.0 + 0.1 * self.calls)


PLUGINS = declarations(Plain, PlainRouter)
"""The plugin of each."""
