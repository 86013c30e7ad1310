"""What a run traces, as the command line says. Needs no torch."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from moefw.core.errors import PlanError
from moefw.tracing.files import TraceFiles

WARM_UP: Final = 3
"""Steps that are not traced by default: they compile, allocate and fill caches."""
STEPS: Final = 2
"""Number of steps that are traced by default."""


@frozen(kw_only=True)
class TraceOptions:
    """What a run traces. ``steps``: their numbers, from 1; None: the default ones.

    ``operators``: also those of PyTorch, by its profiler. ``memory``: also a snapshot of the GPU's memory.
    """

    files: TraceFiles
    steps: range | None = None
    operators: bool = False
    memory: bool = False

    def steps_of(self, start: int, last: int) -> range:
        """Steps to trace in a run that goes on behind step ``start`` and ends with step ``last``.

        Raises PlanError if one of them is not in it.
        """
        if self.steps is None:
            first = min(start + WARM_UP + 1, max(last - STEPS, start) + 1)
            return range(first, min(first + STEPS, last + 1))
        if self.steps.start <= start or self.steps.stop > last + 1:
            asked = f"--trace-steps {self.steps.start}:{self.steps.stop - 1}"
            what = f"{asked}: this run goes from step {start + 1} to step {last}."
            raise PlanError(what, "Name steps of the run.", on_every_rank=True)
        return self.steps
