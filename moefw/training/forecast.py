"""How long a run will take on this machine, told once from its first steps."""

from __future__ import annotations

from statistics import median
from typing import Final, final

from moefw.compose.spec.sections import TrainSpec

WARMUP: Final = 3
"""First steps that are not measured: they compile, and fill caches and the allocator."""
MEASURED: Final = 5
"""Steps after the warm-up from which a forecast is made."""
SOON_S: Final = 10.0
"""Seconds of steps after which it is made from fewer."""
_FORWARD_SHARE: Final = 1 / 3
"""Share of a step's products that forward has: backward has two for each of its own."""


@final
class Forecast:
    """Duration of a run, from the seconds of its first steps.

    It is due after ``WARMUP + MEASURED`` steps, or where steps are slow, after the first one, from the second on, that
    ends ``SOON_S`` into the run. It only looks: no step is run for it, and none is left out because of it. ``start``:
    the number of steps done before.
    """

    def __init__(self, train: TrainSpec, *, start: int) -> None:
        self._train = train
        self._start = start
        self._seconds: list[float] = []
        self._told = False

    def after(self, step_s: float) -> str:
        """Forecast as a line, once, after the step at which it is due; empty after the others.

        ``step_s``: wall time of a step, without the evaluation and the checkpoint that may follow it.
        """
        if self._told:
            return ""
        self._seconds.append(step_s)
        done = len(self._seconds)
        if done < WARMUP + MEASURED and (done == 1 or sum(self._seconds) < SOON_S):
            return ""
        self._told = True
        return self._line()

    def _line(self) -> str:
        done = len(self._seconds)
        skipped = min(WARMUP, done - 1)
        step_s = median(self._seconds[skipped:])
        steps_to_come = self._train.steps - self._start - done
        evaluations_s = step_s * _FORWARD_SHARE * self._evaluated_tokens() / self._train.tokens_per_step
        whole_s = sum(self._seconds) + steps_to_come * step_s + evaluations_s
        measured = f"{step_s:.3g} s a step, measured over steps {self._start + skipped + 1} to {self._start + done}"
        return f"this run takes {_about(whole_s)} on this machine ({measured})"

    def _evaluated_tokens(self) -> int:
        """Tokens of all evaluations of the run. One follows its last step."""
        train = self._train
        before_the_last = 0
        if train.eval_every:
            before_the_last = (train.steps - 1) // train.eval_every - self._start // train.eval_every
        return (before_the_last + 1) * train.eval_tokens


def _about(seconds: float) -> str:
    """Duration in the unit in which it has one or two digits."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} seconds"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.1f} hours"
