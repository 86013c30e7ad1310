"""``cosine`` and ``wsd``: the learning rate over the steps, after a linear warm-up."""

from __future__ import annotations

import math
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import and_, ge, le

import moefw
from moefw.core.plugin import SchedulePlugin

share = and_(ge(0.0), le(1.0))


@frozen(kw_only=True)
class Cosine(SchedulePlugin):
    """Rises over ``warmup_steps``, then falls along half a cosine to ``final_share`` of the peak."""

    name: ClassVar[str] = "cosine"

    warmup_steps: int = field(default=20, validator=ge(0))
    """Number of steps over which the learning rate rises linearly to the peak."""
    final_share: float = field(default=0.1, validator=share)
    """Learning rate at the end, as a share of the peak."""

    def factor(self, step: int, steps: int) -> float:
        """Learning rate of ``step`` as a share of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps + 1) / max(1, steps - self.warmup_steps)
        return self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


@frozen(kw_only=True)
class WSD(SchedulePlugin):
    """Rises over ``warmup_steps``, stays, and falls to ``final_share`` over the last ``decay_share`` of the run.

    The decay is ``1 - sqrt`` (arXiv 2405.18392). It does not begin before the warm-up is over.
    """

    name: ClassVar[str] = "wsd"

    warmup_steps: int = field(default=20, validator=ge(0))
    """Number of steps over which the learning rate rises linearly to the peak."""
    decay_share: float = field(default=0.2, validator=share)
    """Share of the steps, at the end, over which the learning rate falls; not before the warm-up is over."""
    final_share: float = field(default=0.0, validator=share)
    """Learning rate at the end, as a share of the peak."""

    def factor(self, step: int, steps: int) -> float:
        """Learning rate of ``step`` as a share of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decay_steps = min(round(steps * self.decay_share), steps - self.warmup_steps)
        into = step + 1 - (steps - decay_steps)
        if into <= 0:
            return 1.0
        return self.final_share + (1 - self.final_share) * (1 - math.sqrt(min(into / decay_steps, 1.0)))


@moefw.hookimpl
def moefw_schedules() -> list[type[SchedulePlugin]]:
    """Declare the schedules."""
    return [Cosine, WSD]
