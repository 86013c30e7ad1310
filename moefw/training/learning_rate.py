"""The learning rate of a step, and whether it is that of a run of another length."""

from __future__ import annotations

import math
from numbers import Real

from moefw.compose.assembly import Assembly
from moefw.compose.spec.source import show
from moefw.core.errors import RunError


def learning_rate(assembly: Assembly, step: int) -> float:
    """Learning rate of ``step`` (from 0). Raises RunError if the schedule gives none."""
    train = assembly.spec.train
    schedule = assembly.parts.schedule
    factor: object = schedule.factor(step, train.steps)
    if isinstance(factor, Real) and not isinstance(factor, bool):
        rate = train.lr * float(factor)
        if math.isfinite(rate) and rate >= 0:
            return rate
    origin = assembly.registry.origin(schedule)
    what = f"{origin} gives no learning rate in step {step + 1}: its factor is {show(factor)}"
    raise RunError(f"{what}, which is no finite number from 0 on.", f"Mend or uninstall {origin.distribution}.")


def is_another_curve(assembly: Assembly, *, steps_before: int) -> bool:
    """Whether a step of the run has another learning rate than in a run of ``steps_before`` steps."""
    steps = assembly.spec.train.steps
    factor = assembly.parts.schedule.factor
    last_first = reversed(range(min(steps, steps_before)))  # a schedule that depends on the length does so at the end
    return any(factor(step, steps) != factor(step, steps_before) for step in last_first)
