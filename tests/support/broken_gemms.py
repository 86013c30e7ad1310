"""Plain experts that keep their contract, and experts that break it in one way each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.nn import functional as F

import moefw
from moefw.core.plugin import GemmPlugin
from moefw.core.records import Canonical
from moefw.core.stages import ExpertBatch


class PlainExperts(nn.Module, moefw.ExpertGemm):
    """Three stacked weights; groups are sliced by ``offsets_e``."""

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
    runtime: ClassVar[type[PlainExperts]] = PlainExperts
    regions: ClassVar[tuple[tuple[str, str], ...]] = (("moe_act", "keep"), ("moe_act", "recompute"))

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(region=self.regions)

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        return [moefw.need("operand", ("bf16", "fp32"), reason="it calls torch.nn.functional.linear")]

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        return self.runtime(context)


class _ForgetsTheRowWeight(PlainExperts):
    def activate(self, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor, down_DF: Tensor) -> Tensor:
        return super().activate(gate_RF, up_RF, torch.ones_like(weights_R), down_DF)


@frozen
class ForgetsTheRowWeight(Plain):
    name: ClassVar[str] = "forgets-the-row-weight"
    runtime = _ForgetsTheRowWeight


class _OverlooksPadding(PlainExperts):
    def groups(self, batch: ExpertBatch) -> Iterator[tuple[int, slice]]:
        start = 0
        for expert, count in enumerate(batch.counts_e.tolist()):
            yield expert, slice(start, start + count)
            start += count


@frozen
class OverlooksPadding(Plain):
    name: ClassVar[str] = "overlooks-padding"
    runtime = _OverlooksPadding


class _LeavesPaddingAsItWas(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        rows_RD = super().forward(batch)
        padding = torch.ones(len(rows_RD), dtype=torch.bool)
        for (_, piece), count in zip(self.groups(batch), batch.counts_e.tolist(), strict=True):
            padding[piece.start : piece.start + count] = False
        return torch.where(padding.unsqueeze(1), torch.empty_like(rows_RD), rows_RD)


@frozen
class LeavesPaddingAsItWas(Plain):
    name: ClassVar[str] = "leaves-padding-as-it-was"
    runtime = _LeavesPaddingAsItWas


class _SwapsGateAndUp(PlainExperts):
    def canonical(self) -> Iterator[Canonical]:
        for piece in super().canonical():
            swapped = {id(self.gate): self.up, id(self.up): self.gate}.get(id(piece.parameter), piece.parameter)
            yield evolve(piece, parameter=swapped)


@frozen
class SwapsGateAndUp(Plain):
    name: ClassVar[str] = "swaps-gate-and-up"
    runtime = _SwapsGateAndUp


class _ForgetsFullTiles(PlainExperts):
    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        up, full = self.up, len(x_RD) > 0 and len(x_RD) % 32 == 0
        gate_RF = F.linear(self.operand(x_RD), self.operand(self.gate[expert], "weight"))
        up_RF = F.linear(self.operand(x_RD), self.operand(up.detach()[expert] if full else up[expert], "weight"))
        return self.inner(gate_RF, up_RF, weights_R, self.down[expert])


@frozen
class ForgetsFullTiles(Plain):
    name: ClassVar[str] = "forgets-full-tiles"
    runtime = _ForgetsFullTiles


class _ZeroesPadding(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        for (_, piece), count in zip(self.groups(batch), batch.counts_e.tolist(), strict=True):
            batch.rows_RD.data[piece.start + count : piece.stop] = 0
        return super().forward(batch)


@frozen
class ZeroesPadding(Plain):
    name: ClassVar[str] = "zeroes-padding"
    runtime = _ZeroesPadding


class _LosesTheWeightGradient(PlainExperts):
    def activate(self, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor, down_DF: Tensor) -> Tensor:
        return super().activate(gate_RF, up_RF, weights_R.detach(), down_DF)


@frozen
class LosesTheWeightGradient(Plain):
    name: ClassVar[str] = "loses-the-weight-gradient"
    runtime = _LosesTheWeightGradient


class _LosesAParameter(PlainExperts):
    def activate(self, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor, down_DF: Tensor) -> Tensor:
        return super().activate(gate_RF, up_RF, weights_R, down_DF.detach())


@frozen
class LosesAParameter(Plain):
    name: ClassVar[str] = "loses-a-parameter"
    runtime = _LosesAParameter


class _KeepsTheRows(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        self.last = batch.rows_RD.detach()
        return super().forward(batch)


@frozen
class KeepsTheRows(Plain):
    name: ClassVar[str] = "keeps-the-rows"
    runtime = _KeepsTheRows


class _ReadsTheTail(PlainExperts):
    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        return super().one(expert, x_RD, weights_R) + 0.0 * self.mean

    def forward(self, batch: ExpertBatch) -> Tensor:
        object.__setattr__(self, "mean", batch.rows_RD.sum(0))
        return super().forward(batch)


@frozen
class ReadsTheTail(Plain):
    name: ClassVar[str] = "reads-the-tail"
    runtime = _ReadsTheTail


class _NumbersItsOwn(PlainExperts):
    def canonical(self) -> Iterator[Canonical]:
        first = self.numbers.start
        for piece in super().canonical():
            number, rest = piece.name.split(".", 1)
            yield evolve(piece, name=f"{int(number) - first}.{rest}")


@frozen
class NumbersItsOwn(Plain):
    name: ClassVar[str] = "numbers-its-own"
    runtime = _NumbersItsOwn


class _LeavesOutAnExpert(PlainExperts):
    def canonical(self) -> Iterator[Canonical]:
        yield from (piece for piece in super().canonical() if not piece.name.startswith("0.down"))


@frozen
class LeavesOutAnExpert(Plain):
    name: ClassVar[str] = "leaves-out-an-expert"
    runtime = _LeavesOutAnExpert


class _NamesAValueTwice(PlainExperts):
    def canonical(self) -> Iterator[Canonical]:
        for piece in super().canonical():
            yield evolve(piece, index=(0,)) if piece.name.startswith("1.up") else piece


@frozen
class NamesAValueTwice(Plain):
    name: ClassVar[str] = "names-a-value-twice"
    runtime = _NamesAValueTwice


class _ForgetsThatItIsAPart(PlainExperts):
    def canonical(self) -> Iterator[Canonical]:
        for piece in super().canonical():
            yield evolve(piece, shard=None)


@frozen
class ForgetsThatItIsAPart(Plain):
    name: ClassVar[str] = "forgets-that-it-is-a-part"
    runtime = _ForgetsThatItIsAPart


class _AveragesParts(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        shard = self.shards[0]
        return super().forward(batch) / (1 if shard is None else shard.count)


@frozen
class AveragesParts(Plain):
    name: ClassVar[str] = "averages-parts"
    runtime = _AveragesParts


class _KnowsNoRegion(PlainExperts):
    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        self.inner = self.activate


@frozen
class KnowsNoRegion(Plain):
    name: ClassVar[str] = "knows-no-region"
    runtime = _KnowsNoRegion


class _CountsOnTheHost(PlainExperts):
    def groups(self, batch: ExpertBatch) -> Iterator[tuple[int, slice]]:
        ends = torch.tensor(batch.counts_host).cumsum(0).tolist()
        yield from enumerate(slice(start, end) for start, end in zip([0, *ends], ends))


@frozen
class CountsOnTheHost(Plain):
    name: ClassVar[str] = "counts-on-the-host"
    runtime = _CountsOnTheHost


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


class _LeavesItForBackward(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        return _Scale.apply(super().forward(batch), _LEFT)


@frozen
class LeavesItForBackward(Plain):
    name: ClassVar[str] = "leaves-it-for-backward"
    runtime = _LeavesItForBackward


class _RoundsAtRandom(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        rows_RD = super().forward(batch)
        return rows_RD * (1.0 + 1e-6 * torch.rand_like(rows_RD))


@frozen
class RoundsAtRandom(Plain):
    name: ClassVar[str] = "rounds-at-random"
    runtime = _RoundsAtRandom


class _ReturnsHalf(PlainExperts):
    def forward(self, batch: ExpertBatch) -> Tensor:
        return super().forward(batch).bfloat16()


@frozen
class ReturnsHalf(Plain):
    name: ClassVar[str] = "returns-half"
    runtime = _ReturnsHalf


@frozen
class ForgetsThePasses(Plain):
    name: ClassVar[str] = "forgets-the-passes"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return {**super().offers(site), "by_pass": True}


@frozen
class NamesNoProduct(Plain):
    name: ClassVar[str] = "names-no-product"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return {**super().offers(site), "named_products": True}


class _NamesOneProduct(PlainExperts):
    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        self.recipe = self.recipe.at("experts", groups=1)


@frozen
class NamesOneProduct(NamesNoProduct):
    name: ClassVar[str] = "names-one-product"
    runtime = _NamesOneProduct


@frozen
class ForgetsTheKeys(Plain):
    name: ClassVar[str] = "forgets-the-keys"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return {**super().offers(site), "by_pass": True, "row_keys": True}


@frozen
class ForgetsToClamp(Plain):
    name: ClassVar[str] = "forgets-to-clamp"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return {**super().offers(site), "formula": ("swiglu", "clamped_swiglu")}


@frozen
class ForgetsBiases(Plain):
    name: ClassVar[str] = "forgets-biases"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return {**super().offers(site), "formula": ("swiglu", "bias")}


class _Biased(PlainExperts):
    """Adds the whole bias of ``down`` on every rank that holds a part, and without the weight of the row if told so."""

    weighted: ClassVar[bool] = True

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        dims, e = context.site.dims, len(context.local_experts)
        self.biases = nn.ParameterDict() if dims.biased_experts else None
        if self.biases is not None:
            widths = {"gate": self.gate.shape[1], "up": self.up.shape[1], "down": dims.model_dim}
            self.biases.update({part: nn.Parameter(torch.empty(e, width)) for part, width in widths.items()})

    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        if self.biases is None:
            return super().one(expert, x_RD, weights_R)
        gate, up, down = (self.biases[part][expert].to(x_RD.dtype) for part in ("gate", "up", "down"))
        gate_RF = F.linear(self.operand(x_RD), self.operand(self.gate[expert], "weight")) + gate
        up_RF = F.linear(self.operand(x_RD), self.operand(self.up[expert], "weight")) + up
        out_RD = self.inner(gate_RF, up_RF, weights_R, self.down[expert])
        weight_R1 = weights_R.unsqueeze(1).to(x_RD.dtype) if self.weighted else (weights_R > 0).unsqueeze(1)
        return out_RD + weight_R1 * down

    def canonical(self) -> Iterator[Canonical]:
        yield from super().canonical()
        for local, expert in enumerate(self.numbers if self.biases is not None else ()):
            for part, shard in (("gate", self.shards[0]), ("up", self.shards[0]), ("down", None)):
                yield Canonical(f"{expert}.{part}_proj.bias", self.biases[part], (local,), shard)


@frozen
class AddsABiasOnEveryRank(ForgetsBiases):
    name: ClassVar[str] = "adds-a-bias-on-every-rank"
    runtime = _Biased


class _ForgetsTheWeightOfABias(_Biased):
    weighted = False


@frozen
class ForgetsTheWeightOfABias(ForgetsBiases):
    name: ClassVar[str] = "forgets-the-weight-of-a-bias"
    runtime = _ForgetsTheWeightOfABias
