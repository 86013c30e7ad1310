"""Precision recipes that break their contract in one way each."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

import moefw
from declared import NamedAfterItsClass
from moefw.core.plugin import PrecisionPlugin
from moefw.core.records import SavedOperand
from moefw_kernels.random import uniform


@frozen
class _Recipe(NamedAfterItsClass, PrecisionPlugin, moefw.Precision):
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
    def made(self, x: Tensor, role: str) -> Tensor:
        return x + (x.bfloat16().float() - x).detach() if role == "weight" else x


@frozen
class OffersAnother(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        return x.bfloat16()


@frozen
class OffersWhatNobodyTakes(_Recipe):
    operands: ClassVar[tuple[str, ...]] = ("int3",)


@frozen
class LosesColumns(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        return x * (torch.arange(x.shape[-1]) < 128)


@frozen
class Detaches(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        return x.detach() if role == "weight" else x


@frozen
class ScalesTheGradient(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        return 2.0 * x - x.detach()


@frozen
class Flattens(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        return x.flatten(0, -2)


@frozen
class NeedsRows(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        largest = x.detach().abs().max()
        return x / largest * largest


@frozen
class RoundsByChance(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        return x * (1.0 + 1e-6 * torch.rand_like(x))


@frozen
class RemembersTheLargest(_Recipe):
    history: ClassVar[dict[str, float]] = {}

    def made(self, x: Tensor, role: str) -> Tensor:
        self.history[role] = self.history.get(role, 0.0) + float(x.detach().sum())
        return x


@frozen
class WritesIntoTheTensor(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        x.data.clamp_(-1.0, 1.0)
        return x


@frozen
class KeepsAnother(_Recipe):
    def keep(self, x: Tensor, used: Tensor, *, role: Any, during: Any, rows: Any = None) -> SavedOperand:
        return SavedOperand((x,), lambda saved: saved[0].flip(-1))


@frozen
class KeepsLess(_Recipe):
    def keep(self, x: Tensor, used: Tensor, *, role: Any, during: Any, rows: Any = None) -> SavedOperand:
        return SavedOperand((used[..., :1],), lambda saved: saved[0])


@frozen
class TurnsOneOfTwo(_Recipe):
    """Transforms the rows of the input of wgrad, but not those of the gradient."""

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

    rtol: ClassVar[float | None] = 0.1
    axis: ClassVar[int] = -1

    def made(self, x: Tensor, role: str) -> Tensor:
        return rounded(x, self.axis)


@frozen
class ScalesColumns(Int8):
    axis: ClassVar[int] = -2


@frozen
class Int8ByPass(Int8):
    """Correct: scales run along what each product sums over."""

    by_pass: ClassVar[bool] = True
    wrong: ClassVar[tuple[str, str]] = ("", "")

    def quantize(self, x: Tensor, *, role: Any, during: Any, rows: Any = None) -> Tensor:
        sums_over_rows = during == "wgrad" or (role, during) == ("weight", "dgrad")
        return rounded(x, -2 if sums_over_rows != ((role, during) == self.wrong) else -1)

    def keep(self, x: Tensor, used: Any, *, role: Any, during: Any, rows: Any = None) -> SavedOperand:
        return SavedOperand((x,), lambda saved: self.quantize(saved[0], role=role, during=during))


@frozen
class LosesRowsOfTheWeightGradient(Int8ByPass):
    def quantize(self, x: Tensor, *, role: Any, during: Any, rows: Any = None) -> Tensor:
        operand = super().quantize(x, role=role, during=during, rows=rows)
        return operand * (torch.arange(x.shape[-2]) < 128).unsqueeze(1) if during == "wgrad" else operand


@frozen
class ScalesRowsInDgrad(Int8ByPass):
    wrong: ClassVar[tuple[str, str]] = ("weight", "dgrad")


@frozen
class ScalesRowsInWgrad(Int8ByPass):
    wrong: ClassVar[tuple[str, str]] = ("grad", "wgrad")


@frozen
class SharesTheWeightOfForward(Int8ByPass):
    def weight_operands(self, weight: Tensor, passes: Any) -> Any:
        return dict.fromkeys(passes, super().weight_operands(weight, passes)["fprop"])


@frozen
class SumsAlongRowsInBothPasses(Int8ByPass):
    def both_ways(self, x: Tensor, role: Any, rows: Any) -> tuple[Any, SavedOperand]:
        used = self.quantize(x, role=role, during="fprop" if role == "input" else "dgrad", rows=rows)
        return used, SavedOperand((used,), lambda saved: saved[0])


@frozen
class LosesInfinities(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        return torch.where(x.isinf(), 0.0, x) if role == "grad" else x


@frozen
class LosesWhatIsNotANumber(_Recipe):
    """In what it keeps."""

    def keep(self, x: Tensor, used: Tensor, *, role: Any, during: Any, rows: Any = None) -> SavedOperand:
        return SavedOperand((x.nan_to_num(posinf=torch.inf, neginf=-torch.inf),), lambda saved: saved[0])


BLOCK = 32


@frozen
class ScalesTheLastBlockByTheOneBefore(Int8ByPass):
    """Scales of 32 rows; those behind the last full block have the scale of it."""

    def quantize(self, x: Tensor, *, role: Any, during: Any, rows: Any = None) -> Tensor:
        full = x.shape[-2] // BLOCK * BLOCK
        if during != "wgrad" or full in (0, x.shape[-2]):
            return super().quantize(x, role=role, during=during, rows=rows)
        scale = x.detach()[..., full - BLOCK : full, :].abs().amax(-2, keepdim=True) / 127
        tail = (x[..., full:, :] / scale).round().clamp(-127, 127) * scale
        head = super().quantize(x[..., :full, :], role=role, during=during, rows=rows)
        return torch.cat([head, tail], -2)


@frozen
class Int8Drawn(Int8):
    """Correct: gradients are rounded at random, by the key of a row and the column."""

    draws: ClassVar[bool] = True

    def quantize(self, x: Tensor, *, role: Any, during: Any, rows: Any = None) -> Tensor:
        if role != "grad" or rows is None or rows.keys_R is None:
            return super().quantize(x, role=role, during=during, rows=rows)
        scale = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (x / scale + self.drawn(x, rows.keys_R)).floor() * scale

    def drawn(self, x: Tensor, keys_R: Tensor) -> Tensor:
        """Draws in [0, 1) for each value."""
        return uniform(keys_R, x.shape[-1])


@frozen
class DrawsTooLittle(Int8Drawn):
    def drawn(self, x: Tensor, keys_R: Tensor) -> Tensor:
        return 0.9 * super().drawn(x, keys_R)


@frozen
class DrawsByPlace(Int8Drawn):
    def drawn(self, x: Tensor, keys_R: Tensor) -> Tensor:
        return super().drawn(x, torch.arange(len(x)))


@frozen
class DrawsOncePerRow(Int8Drawn):
    def drawn(self, x: Tensor, keys_R: Tensor) -> Tensor:
        return super().drawn(x, keys_R)[:, :1]


@frozen
class KnowsNoRows(_Recipe):
    def quantize(self, x: Tensor, *, role: Any, during: Any) -> Tensor:  # type: ignore[override]
        return self.made(x.float(), role)


@frozen
class MisspellsItsOffer(_Recipe):
    def offers(self, site: moefw.Site) -> moefw.Offers:
        return {**super().offers(site), "replays": ("allone",)}


LARGEST = {"value": 0.0}


@frozen
class RemembersInItsModule(_Recipe):
    def made(self, x: Tensor, role: str) -> Tensor:
        LARGEST["value"] = float(x.detach().sum())
        return x


@frozen
class FlowsInWholeNumbers(_Recipe):
    residual_dtype: ClassVar[Any] = torch.int8
