"""Problems of many rows, told together."""

from __future__ import annotations

from typing import final

from moefw.core.errors import MOST_LISTED, DataError, Problem


@final
class Problems:
    """Problems that one DataError tells: as many as an error lists."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def add(self, problem: Problem) -> None:
        """Keep a problem. Raises DataError if there are as many as an error lists."""
        self._problems.append(problem)
        if len(self._problems) == MOST_LISTED:
            self.raise_any()

    def raise_any(self) -> None:
        """Raise DataError if there are problems."""
        if self._problems:
            raise DataError(self._problems)
