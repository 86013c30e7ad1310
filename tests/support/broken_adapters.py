"""Plain adapters that keep their contract, and adapters that break it in one way each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

import moefw
from declared import declarations
from moefw.core.contracts import Adapter, StackedAdapter
from moefw.core.plugin import AdapterPlugin
from moefw.core.records import AdaptedWeight, Canonical, RowGroups
from moefw.runtime.compute.product import linear
from moefw_kernels.random import uniform

RANK = 8
SCALE = 0.5
CALLS = itertools.count()


class PlainAdapter(nn.Module, Adapter):
    """``x W^T + SCALE (x A^T) B^T``, right in every way."""

    adapts: ClassVar[tuple[str, ...]] = ("attention.", "moe.experts.")
    freezes: ClassVar[tuple[str, ...]] = ("*",)
    needs: ClassVar[tuple[str, ...]] = ("attention.*", "moe.experts.*")
    draws: ClassVar[bool] = False
    offered: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, context: moefw.BuildContext, weight: AdaptedWeight) -> None:
        super().__init__()
        out_dim, in_dim = weight.shape
        self.weight = weight
        self.precision = context.fallback
        self.a = nn.Parameter(torch.empty(RANK, in_dim))
        self.b = nn.Parameter(torch.empty(out_dim, RANK))

    @classmethod
    def adapts_weight(cls, weight: str) -> bool:
        return weight.startswith(cls.adapts)

    @classmethod
    def stack(cls, context: moefw.BuildContext, weight: AdaptedWeight) -> Any:
        return Stack(context, weight)

    def forward(self, x: Tensor, out: Tensor, weight: Tensor, rows: RowGroups | None = None) -> Tensor:
        b = self.b if self.weight.computed is None else self.b[self.weight.computed]
        low = linear(self.seen(x, rows), self.into(), self.precision)
        return out + linear(self.scaled(low), b, self.precision)

    def into(self) -> Tensor:
        return self.a

    def seen(self, x: Tensor, rows: RowGroups | None) -> Tensor:
        return x

    def scaled(self, low: Tensor) -> Tensor:
        return low * SCALE

    def merged(self, weight: Tensor) -> Tensor:
        return weight + SCALE * (self.b @ self.a)

    def canonical(self) -> Iterator[Canonical]:
        if self.weight.experts is None:
            yield from self.factors("", "", (), {"": slice(None)})
            return
        (expert,) = self.weight.experts
        yield from self.factors(f"{expert}.", f"{self.weight.leaf}.", (), outputs(self.weight))

    def factors(self, expert: str, leaf: str, at: tuple[Any, ...], rows: Any) -> Iterator[Canonical]:
        shards = [self.weight.shard if self.weight.shard and self.weight.shard.dim == dim else None for dim in (0, 1)]
        yield Canonical(f"{expert}{leaf}lora_A", self.a, at, shards[1], adapter_std=0.2)
        for output, piece in rows.items():
            name = f"{expert}{output}.lora_B" if output else "lora_B"
            yield Canonical(name, self.b, (*at, piece), shards[0], adapter_std=0.0)


class Stack(nn.Module, StackedAdapter):
    """The same for a stack of experts."""

    def __init__(self, context: moefw.BuildContext, weight: AdaptedWeight) -> None:
        super().__init__()
        assert weight.experts is not None
        out_dim, in_dim = weight.shape
        self.weight, self.precision, self.scale = weight, context.fallback, SCALE
        self.a = nn.Parameter(torch.empty(len(weight.experts), RANK, in_dim))
        self.b = nn.Parameter(torch.empty(len(weight.experts), out_dim, RANK))

    def merged(self, weight: Tensor, expert: int) -> Tensor:
        local = self.local(expert)
        return weight + SCALE * (self.b[local] @ self.a[local])

    def local(self, expert: int) -> int:
        assert self.weight.experts is not None
        return self.weight.experts.index(expert)

    def canonical(self) -> Iterator[Canonical]:
        factors: Any = PlainAdapter.factors
        for local, expert in enumerate(self.weight.experts or ()):
            yield from factors(self, f"{expert}.", f"{self.weight.leaf}.", (local,), outputs(self.weight))


def outputs(weight: AdaptedWeight) -> Any:
    return weight.outputs or {weight.leaf: slice(None)}


@frozen
class Plain(AdapterPlugin):
    """Plain adapters."""

    name: ClassVar[str] = "plain"
    made: ClassVar[type[PlainAdapter]] = PlainAdapter

    def __init_subclass__(cls) -> None:
        cls.freezes = cls.made.freezes

    @property
    def draws(self) -> bool:
        return self.made.draws

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(**self.made.offered)

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        return [moefw.need("adapter", target, reason="it is asked for") for target in self.made.needs]

    def adapts(self, weight: str) -> bool:
        return self.made.adapts_weight(weight)

    def build(self, context: moefw.BuildContext, weight: AdaptedWeight) -> Any:
        return self.made(context, weight)

    def build_stacked(self, context: moefw.BuildContext, weight: AdaptedWeight) -> Any:
        return self.made.stack(context, weight)


class ForgetsTheRows(PlainAdapter):
    def forward(self, x: Tensor, out: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, out, weight)


class MergesNoOneExpert(PlainAdapter):
    @classmethod
    def stack(cls, context: moefw.BuildContext, weight: AdaptedWeight) -> Any:
        return StackMergedWhole(context, weight)


class StackMergedWhole(Stack):
    def merged(self, weight: Tensor) -> Tensor:  # type: ignore[override]
        return weight


class IsNoModule(PlainAdapter):
    @classmethod
    def stack(cls, context: moefw.BuildContext, weight: AdaptedWeight) -> Any:
        return StackOfNothing()


class StackOfNothing(StackedAdapter):
    def merged(self, weight: Tensor, expert: int) -> Tensor:
        return weight

    def canonical(self) -> Iterator[Canonical]:
        return iter(())


class MisspellsItsOffer(PlainAdapter):
    offered: ClassVar[Mapping[str, Any]] = {"replays": ("allways",)}


class AdaptsNothing(PlainAdapter):
    adapts: ClassVar[tuple[str, ...]] = ("attention.no_such_proj",)
    needs: ClassVar[tuple[str, ...]] = ()


class AdaptsNowAndThen(PlainAdapter):
    @classmethod
    def adapts_weight(cls, weight: str) -> bool:
        return next(CALLS) % 5 != 0


class NeedsNothing(PlainAdapter):
    needs: ClassVar[tuple[str, ...]] = ()


class BeginsWithNoise(PlainAdapter):
    def canonical(self) -> Iterator[Canonical]:
        yield from (evolve(piece, adapter_std=0.02) for piece in super().canonical())


class ForgetsTheScaleInMerged(PlainAdapter):
    def merged(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class MergesTransposed(PlainAdapter):
    def merged(self, weight: Tensor) -> Tensor:
        return weight + SCALE * (self.b @ self.a).T


class LosesTheScaleOfAFactor(PlainAdapter):
    """The gradient of A is too large; products are right."""

    def into(self) -> Tensor:
        return self.a / SCALE + (self.a - self.a / SCALE).detach()


class LosesTheGradientOfRows(PlainAdapter):
    def seen(self, x: Tensor, rows: RowGroups | None) -> Tensor:
        return x.detach()


class ForgetsThatOutputsAreLeftOut(PlainAdapter):
    def forward(self, x: Tensor, out: Tensor, weight: Tensor, rows: RowGroups | None = None) -> Tensor:
        delta = linear(self.scaled(linear(x, self.a, self.precision)), self.b, self.precision)
        return out + delta[..., : out.shape[-1]]


class ReturnsFp32(PlainAdapter):
    def forward(self, x: Tensor, out: Tensor, weight: Tensor, rows: RowGroups | None = None) -> Tensor:
        return super().forward(x, out, weight, rows).float()


class Drops(PlainAdapter):
    """Drops half of the values of its input in training, by the keys of rows. Right in every way."""

    draws: ClassVar[bool] = True

    def seen(self, x: Tensor, rows: RowGroups | None) -> Tensor:
        if not self.training or rows is None or rows.keys_R is None:
            return x
        return x * self.kept(x, rows.keys_R).to(x.dtype).view(x.shape) * 2

    def kept(self, x: Tensor, keys_R: Tensor) -> Tensor:
        return uniform(keys_R, x.shape[-1], first=self.first(x)) < 0.5

    def first(self, x: Tensor) -> int:
        shard = self.weight.shard
        return shard.index * x.shape[-1] if shard and shard.dim == 1 else 0


class DropsUnsaid(Drops):
    draws: ClassVar[bool] = False


class DropsByThePartOfARow(Drops):
    """Ranks that split a row drop the same of their parts."""

    def first(self, x: Tensor) -> int:
        return 0


class DropsByTheCall(Drops):
    def kept(self, x: Tensor, keys_R: Tensor) -> Tensor:
        return torch.rand(len(keys_R), x.shape[-1]) < 0.5


class DropsByThePlace(Drops):
    def kept(self, x: Tensor, keys_R: Tensor) -> Tensor:
        return super().kept(x, torch.arange(len(keys_R)) + keys_R.sum())


class DropsTheSameAlways(Drops):
    def kept(self, x: Tensor, keys_R: Tensor) -> Tensor:
        return super().kept(x, torch.zeros_like(keys_R))


class DropsAndScalesNothingUp(Drops):
    def seen(self, x: Tensor, rows: RowGroups | None) -> Tensor:
        seen = super().seen(x, rows)
        return seen / 2 if self.training else seen


class DropsInForwardAlone(Drops):
    def seen(self, x: Tensor, rows: RowGroups | None) -> Tensor:
        seen = super().seen(x, rows)
        return x + (seen - x).detach()


class MakesTheMergedWeight(PlainAdapter):
    def forward(self, x: Tensor, out: Tensor, weight: Tensor, rows: RowGroups | None = None) -> Tensor:
        delta_OI = SCALE * (self.b @ self.a)
        return out + linear(x, delta_OI[self.weight.computed or slice(None)], self.precision)


class NamesAFactorTwice(PlainAdapter):
    def canonical(self) -> Iterator[Canonical]:
        pieces = [*super().canonical()]
        yield from (*pieces, pieces[0])


class NamesAFactorAsTheOther(PlainAdapter):
    def canonical(self) -> Iterator[Canonical]:
        first, *others = super().canonical()
        yield from (first, *(evolve(piece, parameter=first.parameter, index=()) for piece in others))


class NamesOneExpertAsAnother(PlainAdapter):
    def canonical(self) -> Iterator[Canonical]:
        pieces = super().canonical()
        yield from (evolve(piece, name=re.sub(r"^[23]\.", "2.", piece.name)) for piece in pieces)


class NamesWeightsOfAFolder(PlainAdapter):
    def canonical(self) -> Iterator[Canonical]:
        yield from (evolve(piece, adapter_std=None) for piece in super().canonical())


class ForgetsItsWeight(PlainAdapter):
    def __init__(self, context: moefw.BuildContext, weight: AdaptedWeight) -> None:
        super().__init__(context, weight)
        self.weight = evolve(weight, name="attention.proj")


class ClaimsAShard(PlainAdapter):
    """Of both factors, of which ranks have one whole."""

    def canonical(self) -> Iterator[Canonical]:
        yield from (evolve(piece, shard=self.weight.shard) for piece in super().canonical())


class ForgetsItsShard(PlainAdapter):
    def canonical(self) -> Iterator[Canonical]:
        yield from (evolve(piece, shard=None) for piece in super().canonical())


class AddsTheWholeOnEachRank(PlainAdapter):
    """Where inputs are split, what each rank adds is to be a part of a sum: it adds as much as if it were all."""

    def scaled(self, low: Tensor) -> Tensor:
        shard = self.weight.shard
        return super().scaled(low) * (shard.count if shard else 1)


class ScalesOnTheFirstRankAlone(PlainAdapter):
    """Ranks of dp behind the first one scale otherwise."""

    def __init__(self, context: moefw.BuildContext, weight: AdaptedWeight) -> None:
        super().__init__(context, weight)
        self.index = context.layout.index("dp")

    def scaled(self, low: Tensor) -> Tensor:
        return super().scaled(low) * (1 if self.index == 0 else 2)


class CountsExpertsFromItsFirst(PlainAdapter):
    @classmethod
    def stack(cls, context: moefw.BuildContext, weight: AdaptedWeight) -> Any:
        return StackOfLocalNumbers(context, weight)


class StackOfLocalNumbers(Stack):
    def local(self, expert: int) -> int:
        return expert % len(self.weight.experts or ())


class NamesStacksOtherwise(PlainAdapter):
    @classmethod
    def stack(cls, context: moefw.BuildContext, weight: AdaptedWeight) -> Any:
        return StackOfOtherNames(context, weight)


class StackOfOtherNames(Stack):
    def canonical(self) -> Iterator[Canonical]:
        yield from (evolve(piece, name=piece.name.replace("lora_", "")) for piece in super().canonical())


class TellsAnotherScale(PlainAdapter):
    @classmethod
    def stack(cls, context: moefw.BuildContext, weight: AdaptedWeight) -> Any:
        stack = Stack(context, weight)
        stack.scale = 2 * SCALE
        return stack


class AdaptsExpertsOtherwise(PlainAdapter):
    """Adds the delta of an expert twice."""

    def scaled(self, low: Tensor) -> Tensor:
        return super().scaled(low) * (2 if self.weight.experts else 1)


class KeepsRows(PlainAdapter):
    def seen(self, x: Tensor, rows: RowGroups | None) -> Tensor:
        self.last = x.detach()
        return x


class AddsIntoTheProduct(PlainAdapter):
    def forward(self, x: Tensor, out: Tensor, weight: Tensor, rows: RowGroups | None = None) -> Tensor:
        return out.add_(super().forward(x, torch.zeros_like(out), weight, rows))


class FreezesAFactor(PlainAdapter):
    def __init__(self, context: moefw.BuildContext, weight: AdaptedWeight) -> None:
        super().__init__(context, weight)
        self.a.requires_grad_(False)


PLUGINS = declarations(Plain, PlainAdapter)
"""By the class that each makes."""
