"""When what a run does every so many steps is due."""

from __future__ import annotations

from moefw.compose.spec.sections import TrainSpec


def is_due(train: TrainSpec, step: int, *, every: int) -> bool:
    """Whether what is done ``every`` so many steps is due after ``step``, counted from 0.

    It also follows the last step; with 0 that one alone.
    """
    is_last = step + 1 == train.steps
    return is_last or (every > 0 and (step + 1) % every == 0)
