"""How a run ends that does not end by itself."""

from __future__ import annotations

from collections.abc import Iterable

from moefw.core.errors import MoefwError, Problem, RunError


class NotWrittenError(RunError):
    """A file of the run could not be written; what was there before is untouched."""


class LostContactError(RunError):
    """Another rank is gone; that one, or who watches it, says why."""


class StoppedError(MoefwError):
    """A signal asked the run to stop, and it has. ``exit_code``: 128 + the signal's where nothing is to be resumed."""

    def __init__(self, problems: str | Problem | Iterable[Problem], fix: str = "", *, exit_code: int = 75) -> None:
        super().__init__(problems, fix)
        self.exit_code = exit_code
