"""``sample``: a learning-rate schedule."""

from __future__ import annotations

from typing import ClassVar

import moefw
from attrs import field, frozen
from attrs.validators import ge

moefw_api = ">=3,<4"


@frozen(kw_only=True)
class Sample(moefw.SchedulePlugin):
    """Rises in a line over ``warmup_steps``, and falls in a line to zero after the last step."""

    name: ClassVar[str] = "sample"

    warmup_steps: int = field(default=20, validator=ge(0))
    """Number of steps over which the learning rate rises to the peak."""

    def factor(self, step: int, steps: int) -> float:
        """Factor of the learning rate in ``step``, from 0, of ``steps``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return 1 - (step - self.warmup_steps) / max(1, steps - self.warmup_steps)


@moefw.hookimpl
def moefw_schedules() -> list[type[moefw.SchedulePlugin]]:
    """Declare the schedule."""
    return [Sample]
