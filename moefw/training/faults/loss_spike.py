"""Warns of loss spikes."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, final

WARM_UP: Final = 20
"""Number of losses before one can be a spike."""
WINDOW: Final = 50
"""Number of steps over which the mean is taken."""
LOSS_SPIKES: Final = "loss_spikes"
"""The metric that is 1 in a step whose loss is a spike; other steps do not have it."""


@final
class LossSpikes:
    """Compares each loss with the mean of the last ones. ``factor`` is ``train.loss_spike``; None: nothing is a spike.

    The mean starts anew with every start of a run. A non-finite loss is no spike and does not enter the mean.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = math.inf if factor is None else factor
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def warning(self, step: int, loss: float) -> str:
        """Line about the loss of ``step`` if it is a spike, else an empty string."""
        if not math.isfinite(loss):
            return ""
        count = len(self._recent)
        total = sum(self._recent)
        self._recent.append(loss)
        if count < WARM_UP or loss * count <= self._factor * total:
            return ""
        return (
            f"step {step}: the loss {loss:.4g} is a spike: the mean of the last {count} steps is {total / count:.4g}."
        )
