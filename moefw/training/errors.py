"""Errors that end a run early."""

from __future__ import annotations

from collections.abc import Iterable

from moefw.core.errors import MoefwError, Problem, RunError


class NotWrittenError(RunError):
    """A file of the run could not be written; its previous content is untouched."""


class LostContactError(RunError):
    """Another rank is gone. That rank, or the process that watches it, reports why."""


class NotFiniteError(RunError):
    """What a model computes is not finite."""


class StoppedError(MoefwError):
    """A signal has stopped the run. ``exit_code``: 128 + the signal number if there is nothing to resume."""

    def __init__(self, problems: str | Problem | Iterable[Problem], fix: str = "", *, exit_code: int = 75) -> None:
        super().__init__(problems, fix)
        self.exit_code = exit_code
