"""Precision recipes that break their contract in one way each."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

import moefw
from moefw.core.plugin import PrecisionPlugin
from moefw.core.records import SavedOperand


@frozen
class _Recipe(PrecisionPlugin, moefw.Precision):
    """fp32, as a plugin that is its own runtime part."""

    residual_dtype: ClassVar[Any] = torch.float32
    operands: ClassVar[tuple[str, ...]] = ("fp32",)

    def offers(self, site: moefw.Site) -> moefw.Offers:
        return moefw.offers(operand=self.operands, wire=("fp32",))

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        return self

    def quantize(self, x: Tensor, *, role: Any, during: Any, rows: Any = None) -> Tensor:
        return self.made(x.float(), role)

    def made(self, x: Tensor, role: str) -> Tensor:
        return x


@frozen
class Rounds(_Recipe):
    name: ClassVar[str] = "rounds"

    def made(self, x: Tensor, role: str) -> Tensor:
        return x + (x.bfloat16().float() - x).detach() if role == "weight" else x


@frozen
class OffersAnother(_Recipe):
    name: ClassVar[str] = "offers-another"

    def made(self, x: Tensor, role: str) -> Tensor:
        return x.bfloat16()


@frozen
class OffersWhatNobodyTakes(_Recipe):
    name: ClassVar[str] = "offers-what-nobody-takes"
    operands: ClassVar[tuple[str, ...]] = ("int3",)


@frozen
class Detaches(_Recipe):
    name: ClassVar[str] = "detaches"

    def made(self, x: Tensor, role: str) -> Tensor:
        return x.detach() if role == "weight" else x


@frozen
class ScalesTheGradient(_Recipe):
    name: ClassVar[str] = "scales-the-gradient"

    def made(self, x: Tensor, role: str) -> Tensor:
        return 2.0 * x - x.detach()


@frozen
class Flattens(_Recipe):
    name: ClassVar[str] = "flattens"

    def made(self, x: Tensor, role: str) -> Tensor:
        return x.flatten(0, -2)


@frozen
class NeedsStrides(_Recipe):
    name: ClassVar[str] = "needs-strides"

    def made(self, x: Tensor, role: str) -> Tensor:
        return x.view(-1, 32).view(x.shape)


@frozen
class NeedsRows(_Recipe):
    name: ClassVar[str] = "needs-rows"

    def made(self, x: Tensor, role: str) -> Tensor:
        largest = x.detach().abs().max()
        return x / largest * largest


@frozen
class RoundsByChance(_Recipe):
    name: ClassVar[str] = "rounds-by-chance"

    def made(self, x: Tensor, role: str) -> Tensor:
        return x * (1.0 + 1e-6 * torch.rand_like(x))


@frozen
class RemembersTheLargest(_Recipe):
    name: ClassVar[str] = "remembers-the-largest"
    history: ClassVar[dict[str, float]] = {}

    def made(self, x: Tensor, role: str) -> Tensor:
        self.history[role] = self.history.get(role, 0.0) + float(x.detach().sum())
        return x


@frozen
class WritesIntoTheTensor(_Recipe):
    name: ClassVar[str] = "writes-into-the-tensor"

    def made(self, x: Tensor, role: str) -> Tensor:
        x.data.clamp_(-1.0, 1.0)
        return x


@frozen
class KeepsAnother(_Recipe):
    name: ClassVar[str] = "keeps-another"

    def keep(self, x: Tensor, used: Tensor, *, role: Any, during: Any, rows: Any = None) -> SavedOperand:
        return SavedOperand((x,), lambda saved: saved[0].flip(-1))


@frozen
class KeepsLess(_Recipe):
    name: ClassVar[str] = "keeps-less"

    def keep(self, x: Tensor, used: Tensor, *, role: Any, during: Any, rows: Any = None) -> SavedOperand:
        return SavedOperand((used[..., :1],), lambda saved: saved[0])


@frozen
class TurnsOneOfTwo(_Recipe):
    """Transforms the rows of the input of wgrad, but not those of the gradient."""

    name: ClassVar[str] = "turns-one-of-two"
    by_pass: ClassVar[bool] = True

    def keep(self, x: Tensor, used: Tensor, *, role: Any, during: Any, rows: Any = None) -> SavedOperand:
        return SavedOperand((x,), lambda saved: saved[0].flip(-2) if during == "wgrad" else saved[0])


def rounded(x: Tensor, axis: int) -> Tensor:
    """Return ``x`` as integers of 8 bits, with a scale for each line along ``axis``."""
    scale = x.detach().abs().amax(axis, keepdim=True).clamp_min(1e-30) / 127 if x.numel() else torch.ones(())
    return x + ((x / scale).round() * scale - x).detach()


@frozen
class Int8(_Recipe):
    """Correct: one operand for all passes, with a scale for each row."""

    name: ClassVar[str] = "int8"
    rtol: ClassVar[float | None] = 0.1
    axis: ClassVar[int] = -1

    def made(self, x: Tensor, role: str) -> Tensor:
        return rounded(x, self.axis)


@frozen
class ScalesColumns(Int8):
    name: ClassVar[str] = "scales-columns"
    axis: ClassVar[int] = -2


@frozen
class Int8ByPass(Int8):
    """Correct: scales run along what each product sums over."""

    name: ClassVar[str] = "int8-by-pass"
    by_pass: ClassVar[bool] = True
    wrong: ClassVar[tuple[str, str]] = ("", "")

    def quantize(self, x: Tensor, *, role: Any, during: Any, rows: Any = None) -> Tensor:
        sums_over_rows = during == "wgrad" or (role, during) == ("weight", "dgrad")
        return rounded(x, -2 if sums_over_rows != ((role, during) == self.wrong) else -1)

    def keep(self, x: Tensor, used: Any, *, role: Any, during: Any, rows: Any = None) -> SavedOperand:
        return SavedOperand((x,), lambda saved: self.quantize(saved[0], role=role, during=during))


@frozen
class ScalesRowsInDgrad(Int8ByPass):
    name: ClassVar[str] = "scales-rows-in-dgrad"
    wrong: ClassVar[tuple[str, str]] = ("weight", "dgrad")


@frozen
class ScalesRowsInWgrad(Int8ByPass):
    name: ClassVar[str] = "scales-rows-in-wgrad"
    wrong: ClassVar[tuple[str, str]] = ("grad", "wgrad")


@frozen
class KeepsTheWeightOfForward(Int8ByPass):
    name: ClassVar[str] = "keeps-the-weight-of-forward"

    def keep(self, x: Tensor, used: Any, *, role: Any, during: Any, rows: Any = None) -> SavedOperand:
        kept = super().keep(x, used, role=role, during=during, rows=rows)
        return SavedOperand((used,), lambda saved: saved[0]) if role == "weight" else kept


@frozen
class SharesTheWeightOfForward(Int8ByPass):
    name: ClassVar[str] = "shares-the-weight-of-forward"

    def weight_operands(self, weight: Tensor, passes: Any) -> Any:
        return dict.fromkeys(passes, super().weight_operands(weight, passes)["fprop"])


@frozen
class SumsAlongRowsInBothPasses(Int8ByPass):
    name: ClassVar[str] = "sums-along-rows-in-both-passes"

    def both_ways(self, x: Tensor, role: Any, rows: Any) -> tuple[Any, SavedOperand]:
        used = self.quantize(x, role=role, during="fprop" if role == "input" else "dgrad", rows=rows)
        return used, SavedOperand((used,), lambda saved: saved[0])


@frozen
class FlowsInWholeNumbers(_Recipe):
    name: ClassVar[str] = "flows-in-whole-numbers"
    residual_dtype: ClassVar[Any] = torch.int8
