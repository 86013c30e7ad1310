"""Experts that spoil one value of one expert, in forward or in backward, when a test says so."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from attrs import frozen
from torch import Tensor

import moefw
from broken_gemms import Plain, PlainExperts

Fault = Literal["activation", "input gradient", "weight gradient"]


class FaultyExperts(PlainExperts):
    """Spoils ``expert`` of layer ``layer`` wherever it has rows, in the way of ``fault``."""

    fault: ClassVar[Fault | None] = None
    layer: ClassVar[int] = 2
    expert: ClassVar[int] = 5

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__(context)
        self.here, self.running = context.site.layer == self.layer, -1

    def one(self, expert: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        self.running = self.numbers[expert]
        if self.spoils("input gradient") and len(x_RD):
            x_RD = _SpoilsGradient.apply(x_RD)
        rows_RD = super().one(expert, x_RD, weights_R)
        return _spoiled(rows_RD) if self.spoils("activation") and len(x_RD) else rows_RD

    def operand(self, x: Tensor, role: Any = "input") -> Tensor:
        x = super().operand(x, role)
        return _SpoilsGradient.apply(x) if role == "weight" and self.spoils("weight gradient") else x

    def spoils(self, fault: Fault) -> bool:
        return self.here and self.running == self.expert and FaultyExperts.fault == fault


def _spoiled(values: Tensor) -> Tensor:
    flat = torch.zeros(values.numel())
    flat[0] = torch.inf
    return values + flat.view_as(values)


class _SpoilsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _spoiled(grad)


@frozen
class Faulty(Plain):
    name: ClassVar[str] = "faulty"
    made = FaultyExperts
