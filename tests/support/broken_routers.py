"""A plain router that keeps its contract, and routers that break it in one way each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

import moefw
from moefw.core.plugin import RouterPlugin
from moefw.core.records import State
from moefw.core.stages import Batch, Routing
from moefw.runtime.compute.aux_loss import attach


class PlainRouter(nn.Module, moefw.Router):
    """Softmax over the chosen logits, a z-loss, and a bias for the choice."""

    states: ClassVar[tuple[str, ...]] = ("bias",)

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
        if self.training and batch.loss_scale is not None:
            return attach(weights_TK, loss * batch.loss_scale)
        return weights_TK

    @torch.no_grad()
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        counts_E = reduced["tokens_per_expert"]
        self.bias += 0.01 * torch.sign(counts_E.mean() - counts_E)


@frozen
class Plain(RouterPlugin):
    name: ClassVar[str] = "plain"
    runtime: ClassVar[type[PlainRouter]] = PlainRouter

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(partition=("token",))

    def build(self, context: moefw.BuildContext) -> moefw.Router:
        return self.runtime(context.site)


class _CrowdsTheCrowded(PlainRouter):
    @torch.no_grad()
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        counts_E = reduced["tokens_per_expert"]
        self.bias -= 0.01 * torch.sign(counts_E.mean() - counts_E)


@frozen
class CrowdsTheCrowded(Plain):
    name: ClassVar[str] = "crowds-the-crowded"
    runtime = _CrowdsTheCrowded


class _WeighsWithTheBias(PlainRouter):
    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super().weigh(logits_TE + self.bias, ids_TK)


@frozen
class WeighsWithTheBias(Plain):
    name: ClassVar[str] = "weighs-with-the-bias"
    runtime = _WeighsWithTheBias


class _WritesInForward(PlainRouter):
    def count(self, ids_TK: Tensor) -> Tensor:
        self.last_load = super().count(ids_TK)
        return self.last_load


@frozen
class WritesInForward(Plain):
    name: ClassVar[str] = "writes-in-forward"
    runtime = _WritesInForward


class _AdvancesStateInForward(PlainRouter):
    def choose(self, logits_TE: Tensor) -> Tensor:
        ids_TK = super().choose(logits_TE)
        self.update({"tokens_per_expert": self.count(ids_TK)})
        return ids_TK


@frozen
class AdvancesStateInForward(Plain):
    name: ClassVar[str] = "advances-state-in-forward"
    runtime = _AdvancesStateInForward


class _WeighsDroppedChoices(PlainRouter):
    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return logits_TE.gather(1, ids_TK.clamp_min(0)).sigmoid()


@frozen
class WeighsDroppedChoices(Plain):
    name: ClassVar[str] = "weighs-dropped-choices"
    runtime = _WeighsDroppedChoices


class _LosesTheGradient(PlainRouter):
    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super().weigh(logits_TE.detach(), ids_TK)

    def loss(self, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
        return super().loss(logits_TE.detach(), valid_T)


@frozen
class LosesTheGradient(Plain):
    name: ClassVar[str] = "loses-the-gradient"
    runtime = _LosesTheGradient


class _LosesTheTokens(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return super().logits(x_TD.detach(), batch)


@frozen
class LosesTheTokens(Plain):
    name: ClassVar[str] = "loses-the-tokens"
    runtime = _LosesTheTokens


class _LooksAtOthers(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        logits_TE = super().logits(x_TD, batch)
        return logits_TE - logits_TE.mean(0) if len(x_TD) else logits_TE


@frozen
class LooksAtOthers(Plain):
    name: ClassVar[str] = "looks-at-others"
    runtime = _LooksAtOthers


class _LooksAtThePlace(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        places_T = torch.arange(len(x_TD)) % batch.ids_BS.shape[1] if len(x_TD) else torch.zeros(0)
        return super().logits(x_TD, batch) * (1.0 + 0.2 * places_T.unsqueeze(1))


@frozen
class LooksAtThePlace(Plain):
    name: ClassVar[str] = "looks-at-the-place"
    runtime = _LooksAtThePlace


class _LosesByMicroBatch(PlainRouter):
    def loss(self, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
        mean_E = (logits_TE.softmax(-1) * valid_T.unsqueeze(1)).sum(0) / valid_T.sum().clamp_min(1)
        return valid_T.sum() * mean_E.square().sum()


@frozen
class LosesByMicroBatch(Plain):
    name: ClassVar[str] = "loses-by-micro-batch"
    runtime = _LosesByMicroBatch


@frozen
class LooksAtItsPart(LooksAtOthers):
    name: ClassVar[str] = "looks-at-its-part"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(partition=("micro_batch",))


@frozen
class LosesByPart(LosesByMicroBatch):
    name: ClassVar[str] = "loses-by-part"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(partition=("micro_batch",))


class _CountsTheMask(PlainRouter):
    def count(self, ids_TK: Tensor) -> Tensor:
        return super().count(ids_TK.clamp_min(0))


@frozen
class CountsTheMask(Plain):
    name: ClassVar[str] = "counts-the-mask"
    runtime = _CountsTheMask


class _SendsTheMask(PlainRouter):
    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        return super().forward(x_TD, Batch(ids_BS=batch.ids_BS, labels_BS=batch.labels_BS, loss_scale=batch.loss_scale))


@frozen
class SendsTheMask(Plain):
    name: ClassVar[str] = "sends-the-mask"
    runtime = _SendsTheMask


class _AttachesTwice(PlainRouter):
    def attached(self, weights_TK: Tensor, loss: Tensor, batch: Batch) -> Tensor:
        return super().attached(super().attached(weights_TK, loss, batch), loss, batch)


@frozen
class AttachesTwice(Plain):
    name: ClassVar[str] = "attaches-twice"
    runtime = _AttachesTwice


class _AttachesUnscaled(PlainRouter):
    def attached(self, weights_TK: Tensor, loss: Tensor, batch: Batch) -> Tensor:
        return weights_TK if batch.loss_scale is None else attach(weights_TK, loss)


@frozen
class AttachesUnscaled(Plain):
    name: ClassVar[str] = "attaches-unscaled"
    runtime = _AttachesUnscaled


class _DrawsByCall(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return super().logits(x_TD * (1.0 + 0.1 * torch.rand_like(x_TD)), batch)


@frozen
class DrawsByCall(Plain):
    name: ClassVar[str] = "draws-by-call"
    runtime = _DrawsByCall


class _IsBornAtRandom(PlainRouter):
    def __init__(self, site: moefw.Site) -> None:
        super().__init__(site)
        self.register_buffer("offset", torch.rand(site.dims.num_experts), persistent=False)

    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return super().logits(x_TD, batch) + self.offset


@frozen
class IsBornAtRandom(Plain):
    name: ClassVar[str] = "is-born-at-random"
    runtime = _IsBornAtRandom


class _ForgetsReplay(PlainRouter):
    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        batch = Batch(
            ids_BS=batch.ids_BS, labels_BS=batch.labels_BS, mask_BS=batch.mask_BS, loss_scale=batch.loss_scale
        )
        return super().forward(x_TD, batch)


@frozen
class ForgetsReplay(Plain):
    name: ClassVar[str] = "forgets-replay"
    runtime = _ForgetsReplay


class _HidesState(PlainRouter):
    states: ClassVar[tuple[str, ...]] = ()


@frozen
class HidesState(Plain):
    name: ClassVar[str] = "hides-state"
    runtime = _HidesState


class _NamesStateThatIsNotThere(PlainRouter):
    states: ClassVar[tuple[str, ...]] = ("bias", "momentum")


@frozen
class NamesStateThatIsNotThere(Plain):
    name: ClassVar[str] = "names-state-that-is-not-there"
    runtime = _NamesStateThatIsNotThere


class _UpdatesByHabit(PlainRouter):
    """Updates depend on the amount routed so far, which is stored outside the module."""

    def count(self, ids_TK: Tensor) -> Tensor:
        _ROUTED[id(self)] = _ROUTED.get(id(self), 0) + len(ids_TK)
        return super().count(ids_TK)

    @torch.no_grad()
    def update(self, reduced: Mapping[str, Tensor]) -> None:
        self.bias += 0.001 * _ROUTED.get(id(self), 0)


_ROUTED: dict[int, int] = {}


@frozen
class UpdatesByHabit(Plain):
    name: ClassVar[str] = "updates-by-habit"
    runtime = _UpdatesByHabit


class _DropsAndCountsAfterwards(PlainRouter):
    def choose(self, logits_TE: Tensor) -> Tensor:
        ids_TK = super().choose(logits_TE)
        return torch.where(ids_TK == 0, -1, ids_TK)


@frozen
class DropsAndCountsAfterwards(Plain):
    name: ClassVar[str] = "drops-and-counts-afterwards"
    runtime = _DropsAndCountsAfterwards


class _ChoosesTwice(PlainRouter):
    def choose(self, logits_TE: Tensor) -> Tensor:
        return super().choose(logits_TE)[:, :1].expand(-1, self.dims.top_k)


@frozen
class ChoosesTwice(Plain):
    name: ClassVar[str] = "chooses-twice"
    runtime = _ChoosesTwice


class _WeighsInHalf(PlainRouter):
    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super().weigh(logits_TE, ids_TK).bfloat16()


@frozen
class WeighsInHalf(Plain):
    name: ClassVar[str] = "weighs-in-half"
    runtime = _WeighsInHalf


class _DividesByNoTokens(PlainRouter):
    def loss(self, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
        return 0.1 * logits_TE.logsumexp(-1).square().mean() * len(valid_T)


@frozen
class DividesByNoTokens(Plain):
    name: ClassVar[str] = "divides-by-no-tokens"
    runtime = _DividesByNoTokens


class _LeansOnTheRank(PlainRouter):
    def logits(self, x_TD: Tensor, batch: Batch) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return super().logits(x_TD, batch) * (1.0 + rank)


@frozen
class LeansOnTheRank(Plain):
    name: ClassVar[str] = "leans-on-the-rank"
    runtime = _LeansOnTheRank


class _CountsMaskedRows(PlainRouter):
    def forward(self, x_TD: Tensor, batch: Batch) -> Routing:
        routing = super().forward(x_TD, batch)
        return replace(routing, num_rows=routing.expert_ids_TK.numel())


@frozen
class CountsMaskedRows(Plain):
    name: ClassVar[str] = "counts-masked-rows"
    runtime = _CountsMaskedRows
