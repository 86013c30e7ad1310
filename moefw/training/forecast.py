"""How long a run will take on this machine: told before its first step, and corrected once where that was wrong."""

from __future__ import annotations

from statistics import median
from typing import Final, final

from moefw.compose.spec.sections import TrainSpec

REHEARSALS: Final = 3
"""Runs of the first step without its update, before it counts. The first of them is not measured."""
MOST_SHARE: Final = 0.01
"""Largest number of rehearsals in relation to the steps to come."""
WARM_UP: Final = 3
"""First steps that are not measured: they compile, and fill caches and the allocator."""
MEASURED: Final = 5
"""Steps after the warm-up from which a forecast is made or corrected."""
SOON_S: Final = 10.0
"""Seconds of steps after which it is made from fewer."""
CORRECTED: Final = 0.1
"""Least difference, in relation to the duration that was told, with which another one is told."""
_FORWARD_SHARE: Final = 1 / 3
"""Share of a step's products that forward has: backward has two for each of its own."""


@final
class Forecast:
    """Duration of a run, from the seconds of rehearsals and of the first steps. ``start``: the steps done before.

    Rehearsals take at most a hundredth of the steps to come. A run of fewer has none, and neither has one whose steps
    are replayed as a graph, of which they say nothing; its forecast comes after ``WARM_UP + MEASURED`` steps, or where
    steps are slow, after the first one, from the second on, that ends ``SOON_S`` into the run. A forecast from
    rehearsals is compared with the same steps, and corrected if it was wrong by more than a tenth.
    """

    def __init__(self, train: TrainSpec, *, start: int) -> None:
        self._train = train
        self._start = start
        self._seconds: list[float] = []
        self._told_s: float | None = None
        self._is_final = False

    @property
    def rehearsals(self) -> int:
        """Number of rehearsals that come before the first step, the same on every rank."""
        steps_to_come = self._train.steps - self._start
        if self._train.graphs != "none" or MOST_SHARE * steps_to_come < REHEARSALS:
            return 0
        return REHEARSALS

    def rehearsed(self, seconds: list[float]) -> str:
        """Forecast as a line, from the wall times of all rehearsals."""
        step_s = median(seconds[1:])
        self._told_s = self._whole_s(step_s)
        measured = f"{step_s:.3g} s a step, rehearsed without its update; checkpoints are not in it"
        return f"this run takes {_about(self._told_s)} on this machine ({measured})"

    def after(self, step_s: float) -> str:
        """Forecast as a line, after the step at which it is due, if none was told or that was wrong; else empty.

        ``step_s``: wall time of a step, without the evaluation and the checkpoint that may follow it.
        """
        if self._is_final:
            return ""
        self._seconds.append(step_s)
        done = len(self._seconds)
        if done < WARM_UP + MEASURED and (done == 1 or sum(self._seconds) < SOON_S):
            return ""
        self._is_final = True
        return self._measured()

    def _measured(self) -> str:
        done = len(self._seconds)
        skipped = min(WARM_UP, done - 1)
        step_s = median(self._seconds[skipped:])
        whole_s = sum(self._seconds) + self._whole_s(step_s, done=done)
        duration = _about(whole_s)
        if self._told_s is not None:
            told = _about(self._told_s)
            if duration == told or abs(whole_s - self._told_s) <= CORRECTED * self._told_s:
                return ""
            duration = f"{duration}, not {told},"
        first = self._start + skipped + 1
        last = self._start + done
        steps = f"in step {last}" if first == last else f"over steps {first} to {last}"
        return f"this run takes {duration} on this machine ({step_s:.3g} s a step, measured {steps})"

    def _whole_s(self, step_s: float, *, done: int = 0) -> float:
        """Seconds of all evaluations, and of the steps that are left after ``done`` ones, of ``step_s`` each."""
        evaluations_s = step_s * _FORWARD_SHARE * self._evaluated_tokens() / self._train.tokens_per_step
        return (self._train.steps - self._start - done) * step_s + evaluations_s

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
