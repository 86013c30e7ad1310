"""Plain experts that keep their contract, and experts that break it in one way each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.nn import functional as F

import moefw
from declared import declarations
from moefw.core.plugin import GemmPlugin
from moefw.core.records import AdaptedWeight, Canonical
from moefw.core.stages import ExpertBatch
from moefw.runtime.compute.product import linear
from moefw.runtime.forward_context import forward_context


class PlainExperts(nn.Module, moefw.ExpertGemm):
    """Three stacked weights; groups are sliced by ``offsets_e``."""

    promised: ClassVar[Mapping[str, Any]] = {}
    """What its plugin offers beside its regions."""

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__()
        dims = context.site.dims
        f, e = dims.expert_dim // context.layout.size("etp"), len(context.local_experts)
        self.numbers, self.shards = context.local_experts, (context.expert_shard(0), context.expert_shard(1))
        self.recipe = context.recipe("moe.experts")
        self.gate = nn.Parameter(torch.empty(e, f, dims.model_dim))
        self.up = nn.Parameter(torch.empty(e, f, dims.model_dim))
        self.down = nn.Parameter(torch.empty(e, dims.model_dim, f))
        self.inner = context.region("moe_act", self.activate)

    def forward(self, batch: ExpertBatch) -> Tensor:
        pieces = self.groups(batch)
        outs = [self.one(expert, batch.rows_RD[piece], batch.row_weights_R[piece]) for expert, piece in pieces]
        return torch.cat([*outs, self.rest(batch, sum(map(len, outs)))])

    def groups(self, batch: ExpertBatch) -> Iterator[tuple[int, slice]]:
        start = 0
        for expert, end in enumerate(batch.offsets_e.tolist()):
            yield expert, slice(start, end)
            start = end

    def rest(self, batch: ExpertBatch, start: int) -> Tensor:
        return torch.zeros_like(batch.rows_RD[start:])

    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        gate_RF = F.linear(self.operand(x_RD), self.operand(self.gate[expert], "weight"))
        up_RF = F.linear(self.operand(x_RD), self.operand(self.up[expert], "weight"))
        return self.inner(gate_RF, up_RF, weights_R, self.down[expert])

    def activate(self, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor, down_DF: Tensor) -> Tensor:
        hidden_RF = F.silu(gate_RF) * up_RF * weights_R.unsqueeze(1).to(gate_RF.dtype)
        return F.linear(self.operand(hidden_RF), self.operand(down_DF, "weight"))

    def operand(self, x: Tensor, role: Any = "input") -> Tensor:
        return self.recipe.quantize(x, role=role, during="fprop")

    def canonical(self) -> Iterator[Canonical]:
        for local, expert in enumerate(self.numbers):
            yield Canonical(f"{expert}.gate_proj.weight", self.gate, (local,), self.shards[0])
            yield Canonical(f"{expert}.up_proj.weight", self.up, (local,), self.shards[0])
            yield Canonical(f"{expert}.down_proj.weight", self.down, (local,), self.shards[1])


@frozen
class Plain(GemmPlugin):
    name: ClassVar[str] = "plain"
    made: ClassVar[type[PlainExperts]] = PlainExperts
    regions: ClassVar[tuple[tuple[str, str], ...]] = (("moe_act", "keep"), ("moe_act", "recompute"))

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return {**moefw.offers(region=self.regions), **self.made.promised}

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        return [moefw.need("operand", ("bf16", "fp32"), reason="it calls torch.nn.functional.linear")]

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        return self.made(context)


class ForgetsTheRowWeight(PlainExperts):
    def activate(self, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor, down_DF: Tensor) -> Tensor:
        return super().activate(gate_RF, up_RF, torch.ones_like(weights_R), down_DF)


class OverlooksPadding(PlainExperts):
    def groups(self, batch: ExpertBatch) -> Iterator[tuple[int, slice]]:
        start = 0
        for expert, count in enumerate(batch.counts_e.tolist()):
            yield expert, slice(start, start + count)
            start += count


class LeavesPaddingAsItWas(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        rows_RD = super().forward(batch)
        padding = torch.ones(len(rows_RD), dtype=torch.bool)
        for (_, piece), count in zip(self.groups(batch), batch.counts_e.tolist(), strict=True):
            padding[piece.start : piece.start + count] = False
        return torch.where(padding.unsqueeze(1), torch.empty_like(rows_RD), rows_RD)


class SwapsGateAndUp(PlainExperts):
    def canonical(self) -> Iterator[Canonical]:
        for piece in super().canonical():
            swapped = {id(self.gate): self.up, id(self.up): self.gate}.get(id(piece.parameter), piece.parameter)
            yield evolve(piece, parameter=swapped)


class ForgetsFullTiles(PlainExperts):
    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        up, full = self.up, len(x_RD) > 0 and len(x_RD) % 32 == 0
        gate_RF = F.linear(self.operand(x_RD), self.operand(self.gate[expert], "weight"))
        up_RF = F.linear(self.operand(x_RD), self.operand(up.detach()[expert] if full else up[expert], "weight"))
        return self.inner(gate_RF, up_RF, weights_R, self.down[expert])


class ZeroesPadding(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        for (_, piece), count in zip(self.groups(batch), batch.counts_e.tolist(), strict=True):
            batch.rows_RD.data[piece.start + count : piece.stop] = 0
        return super().forward(batch)


class LosesTheWeightGradient(PlainExperts):
    def activate(self, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor, down_DF: Tensor) -> Tensor:
        return super().activate(gate_RF, up_RF, weights_R.detach(), down_DF)


class KeepsTheRows(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        self.last = batch.rows_RD.detach()
        return super().forward(batch)


class ReadsTheTail(PlainExperts):
    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        return super().one(expert, x_RD, weights_R) + 0.0 * self.mean

    def forward(self, batch: ExpertBatch) -> Tensor:
        object.__setattr__(self, "mean", batch.rows_RD.sum(0))
        return super().forward(batch)


class NumbersItsOwn(PlainExperts):
    def canonical(self) -> Iterator[Canonical]:
        first = self.numbers.start
        for piece in super().canonical():
            number, rest = piece.name.split(".", 1)
            yield evolve(piece, name=f"{int(number) - first}.{rest}")


class NamesAValueTwice(PlainExperts):
    def canonical(self) -> Iterator[Canonical]:
        for piece in super().canonical():
            yield evolve(piece, index=(0,)) if piece.name.startswith("1.up") else piece


class ForgetsThatItIsAPart(PlainExperts):
    def canonical(self) -> Iterator[Canonical]:
        for piece in super().canonical():
            yield evolve(piece, shard=None)


class AveragesParts(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        shard = self.shards[0]
        return super().forward(batch) / (1 if shard is None else shard.count)


class KnowsNoRegion(PlainExperts):
    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        self.inner = self.activate


class CountsOnTheHost(PlainExperts):
    def groups(self, batch: ExpertBatch) -> Iterator[tuple[int, slice]]:
        ends = torch.tensor(batch.counts_host).cumsum(0).tolist()
        yield from enumerate(slice(start, end) for start, end in zip([0, *ends], ends))


class _Scale(torch.autograd.Function):
    """Reads in backward a tensor that the latest forward left."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, left: list[Tensor]) -> Tensor:
        left[:] = [rows_RD.abs().sum()]
        ctx.left = left
        return rows_RD.clone()

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return grad_RD * ctx.left[0] / ctx.left[0].round(), None


_LEFT: list[Tensor] = []


class LeavesItForBackward(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        return _Scale.apply(super().forward(batch), _LEFT)


class ForgetsEarlierMicroBatches(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        self.gate.grad = None
        return super().forward(batch)


class LosesLateGradients(PlainExperts):
    def operand(self, x: Tensor, role: Any = "input") -> Tensor:
        is_lost = role == "weight" and forward_context().wgrads is not None
        return super().operand(x.detach() if is_lost else x, role)


class RoundsAtRandom(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        rows_RD = super().forward(batch)
        return rows_RD * (1.0 + 1e-6 * torch.rand_like(rows_RD))


class ReturnsHalf(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        return super().forward(batch).bfloat16()


class ForgetsThePasses(PlainExperts):
    promised = {"by_pass": True}


class NamesNoProduct(PlainExperts):
    promised = {"named_products": True}


class NamesOneProduct(NamesNoProduct):
    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        self.recipe = self.recipe.at("experts", groups=1)


class NamesTwoWeightsAsOne(PlainExperts):
    promised = {"named_products": True}

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        experts = len(self.numbers)
        self.gate_and_up = self.recipe.at("gate_up", groups=experts)
        self.out_of = self.recipe.at("down", groups=experts)

    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        gate_RF = linear(x_RD, self.gate[expert], self.gate_and_up)
        up_RF = linear(x_RD, self.up[expert], self.gate_and_up)
        return self.inner(gate_RF, up_RF, weights_R, self.down[expert])

    def activate(self, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor, down_DF: Tensor) -> Tensor:
        hidden_RF = F.silu(gate_RF) * up_RF * weights_R.unsqueeze(1).to(gate_RF.dtype)
        return linear(hidden_RF, down_DF, self.out_of)


class CutsLongGroupsShort(PlainExperts):
    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        out_RD = super().one(expert, x_RD, weights_R)
        return torch.cat([out_RD[:128], torch.zeros_like(out_RD[128:])])


class SumsOneTile(PlainExperts):
    """Sums over the first 64 columns alone, as a kernel does that has no loop over tiles."""

    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        gate_RF = F.linear(self.operand(x_RD[:, :64]), self.operand(self.gate[expert, :, :64], "weight"))
        up_RF = F.linear(self.operand(x_RD[:, :64]), self.operand(self.up[expert, :, :64], "weight"))
        return self.inner(gate_RF, up_RF, weights_R, self.down[expert])


class TakesAScale(PlainExperts):
    def forward(self, batch: ExpertBatch, scale: float) -> Tensor:  # type: ignore[override]
        return scale * super().forward(batch)


_SEEN: list[tuple[int, ...]] = []


class CountsInItsModule(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        _SEEN.append(tuple(batch.rows_RD.shape))
        return super().forward(batch)


class MisspellsItsOffer(PlainExperts):
    promised = moefw.offers(formula=("swiglu", "biass"))


class MisspellsAMechanism(PlainExperts):
    promised = moefw.offers(region=(("moe_act", "recompte"),))


class ForgetsTheKeys(PlainExperts):
    promised = {"by_pass": True, "row_keys": True}


class ForgetsToClamp(PlainExperts):
    promised = {"formula": ("swiglu", "clamped_swiglu")}


class ForgetsBiases(PlainExperts):
    promised = {"formula": ("swiglu", "bias")}


class MultipliesWeightsAsTheyAre(PlainExperts):
    def operand(self, x: Tensor, role: Any = "input") -> Tensor:
        return x if role == "weight" else super().operand(x, role)


class OffersReplays(PlainExperts):
    promised = moefw.offers(replays=moefw.ANY)


class AdaptedExperts(PlainExperts):
    """Multiplies with adapters, right in every way."""

    promised = moefw.offers(adapter=("moe.experts.gate_up_proj", "moe.experts.down_proj"))
    order = ("gate_proj", "up_proj")

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        self.adapters = nn.ModuleList(self.asked(context, expert) for expert in self.numbers)

    def asked(self, context: moefw.BuildContext, expert: int) -> nn.ModuleList:
        f, d = self.gate.shape[1:]
        number = range(expert, expert + 1)
        into, out_of = self.shards_of_adapters()
        first, second = self.order
        outputs = {first: slice(0, f), second: slice(f, 2 * f)}
        gate_up = AdaptedWeight(
            name="moe.experts.gate_up_proj", shape=(2 * f, d), shard=into, experts=number, outputs=outputs
        )
        down = AdaptedWeight(name="moe.experts.down_proj", shape=(d, f), shard=out_of, experts=number)
        asked = (context.adapter(gate_up), context.adapter(down))
        return nn.ModuleList(adapter for adapter in asked if adapter is not None)

    def shards_of_adapters(self) -> Any:
        return self.shards

    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        if not self.adapters[expert]:
            return super().one(expert, x_RD, weights_R)
        into, out_of = self.adapters[expert]  # type: ignore[misc]
        gate_up = torch.cat([self.gate[expert], self.up[expert]])
        h_RH = into(x_RD, F.linear(self.operand(x_RD), self.operand(gate_up, "weight")), gate_up)
        gate_RF, up_RF = h_RH.chunk(2, -1)
        hidden_RF = F.silu(gate_RF) * up_RF * weights_R.unsqueeze(1).to(gate_RF.dtype)
        out_RD = F.linear(self.operand(hidden_RF), self.operand(self.down[expert], "weight"))
        return out_of(hidden_RF, out_RD, self.down[expert])

    def canonical(self) -> Iterator[Canonical]:
        yield from super().canonical()
        adapters: Any = (adapter for of_expert in self.adapters for adapter in of_expert)
        for adapter in adapters:
            yield from adapter.canonical()


class OffersAdaptersAlone(PlainExperts):
    promised = AdaptedExperts.promised


class IgnoresAdaptersOfDown(AdaptedExperts):
    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        into = self.adapters[expert][0]
        gate_up = torch.cat([self.gate[expert], self.up[expert]])
        gate_RF, up_RF = into(x_RD, F.linear(x_RD, gate_up), gate_up).chunk(2, -1)
        return self.inner(gate_RF, up_RF, weights_R, self.down[expert])


class ExchangesGateAndUpOfAdapters(AdaptedExperts):
    order = ("up_proj", "gate_proj")


class NamesNoAdapters(AdaptedExperts):
    def canonical(self) -> Iterator[Canonical]:
        yield from PlainExperts.canonical(self)


class AdaptsForgettingTheRowWeight(AdaptedExperts):
    """Multiplies the rows of the second adapter by their weights twice."""

    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        weight = weights_R.unsqueeze(1)
        plain = PlainExperts.one(self, expert, x_RD, weights_R)
        return plain + weight * (super().one(expert, x_RD, weights_R) - plain)


class ForgetsTheShardsOfAdapters(AdaptedExperts):
    def shards_of_adapters(self) -> Any:
        return None, None


@frozen
class BuildsNothing(GemmPlugin):
    name: ClassVar[str] = "builds-nothing"


@frozen
class AsksWithoutASite(Plain):
    name: ClassVar[str] = "asks-without-a-site"

    def needs(self) -> Sequence[moefw.Need]:  # type: ignore[override]
        return ()


@frozen
class BuildsWithoutAContext(Plain):
    name: ClassVar[str] = "builds-without-a-context"

    def build(self) -> moefw.ExpertGemm:  # type: ignore[override]
        raise AssertionError("it is not called")


@frozen
class BuildsALayer(Plain):
    name: ClassVar[str] = "builds-a-layer"

    def build(self, context: moefw.BuildContext) -> Any:
        return nn.Linear(1, 1)


PLUGINS = declarations(Plain, PlainExperts)
"""The plugin of each."""
