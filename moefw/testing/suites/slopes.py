"""Comparison of gradients with finite differences, along random directions, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

DIRECTIONS = 5
STEP = 1e-2
"""Largest step, as a share of a direction with random normal entries."""
HALVINGS = 4
"""How often the step is halved, at most, until the slope has settled."""
SETTLED = 2e-2
"""Relative difference between the slopes over a step and over half of it, below which the slope counts as measured."""

Value = Callable[[], tuple[Tensor, Tensor]]
"""Returns a scalar, and the choices that it depends on. If choices change, there is no slope."""


@frozen
class Slopes:
    """Slopes along directions: measured, and claimed by a gradient."""

    measured: tuple[float, ...]
    claimed: tuple[float, ...]

    @property
    def steepest(self) -> float:
        """The largest absolute slope."""
        return max(map(abs, (*self.measured, *self.claimed)), default=0.0)

    @property
    def ratio(self) -> float:
        """Ratio of claimed to measured slopes, by least squares."""
        squares = sum(slope * slope for slope in self.measured)
        return sum(a * b for a, b in zip(self.measured, self.claimed, strict=True)) / squares if squares else 0.0

    def agree(self, rtol: float, *, noise: float = 1e-5) -> bool:
        """Whether all pairs differ by at most ``rtol`` of the steepest slope, or by the measurement's noise."""
        pairs = zip(self.measured, self.claimed, strict=True)
        return all(abs(a - b) <= max(rtol * self.steepest, noise) for a, b in pairs)

    def __str__(self) -> str:
        worst = max(zip(self.measured, self.claimed, strict=True), key=lambda pair: abs(pair[0] - pair[1]))
        return f"{worst[1]:.4g} where {worst[0]:.4g} is measured"


@torch.no_grad()
def slopes(value: Value, variable: Tensor, grad: Tensor) -> Slopes:
    """Slopes of ``value`` along random directions of ``variable``: measured, and claimed by ``grad``.

    Directions without a stable slope are left out, such as those along which choices change at every step size.
    """
    generator = torch.Generator().manual_seed(0)
    measured: list[float] = []
    claimed: list[float] = []
    for _ in range(DIRECTIONS):
        direction = torch.randn(variable.shape, generator=generator).to(variable.dtype)
        slope = _slope(value, variable, direction)
        if slope is not None:
            measured.append(slope)
            claimed.append((grad.double() * direction.double()).sum().item())
    return Slopes(tuple(measured), tuple(claimed))


def _slope(value: Value, variable: Tensor, direction: Tensor) -> float | None:
    """Slope along a direction; None if it does not settle as the step is halved."""
    value_at_origin, choices = value()
    step = STEP
    previous = _difference(value, variable, direction, step, choices)
    for _ in range(HALVINGS):
        step /= 2
        slope = _difference(value, variable, direction, step, choices)
        noise = 1e-6 * (1.0 + abs(value_at_origin.item())) / step  # of the rounding of fp32, divided by the step
        if slope is not None and previous is not None and abs(slope - previous) <= SETTLED * abs(slope) + noise:
            return slope
        previous = slope
    return None


def _difference(value: Value, variable: Tensor, direction: Tensor, step: float, choices: Tensor) -> float | None:
    """Central difference along a direction; None if other choices are made at one of its ends."""
    origin = variable.detach().clone()
    ends = []
    try:
        for sign in (1.0, -1.0):
            variable.data.copy_(origin + sign * step * direction)
            end, choices_at_end = value()
            if not torch.equal(choices_at_end, choices):
                return None
            ends.append(end.item())
    finally:
        variable.data.copy_(origin)
    return (ends[0] - ends[1]) / (2 * step)
