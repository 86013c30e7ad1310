"""Whole numbers in the environment of a process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import final

from moefw.core.errors import PlanError, Problem


@final
class EnvironmentReader:
    """Reads variables and collects the problems of all, so that they are told together."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.environment = environment
        self.problems: list[Problem] = []

    def number(self, name: str, default: int, *, least: int = 0, most: int | None = None, fix: str = "") -> int:
        """Number that ``name`` holds. ``default``: of a variable that is not set, or is wrong.

        ``fix``: what the user is told to do; empty: to correct or to unset the variable.
        """
        text = self.environment.get(name)
        if text is None:
            return default
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        if re.fullmatch(r"\s*[0-9]{1,18}\s*", text, re.ASCII):
            number = int(text)
            if number >= least and (most is None or number <= most):
                return number
        what = f"{name} is {text!r}, which is no whole number {bounds}."
        self.problems.append(Problem(what, fix or "Correct it, or unset it."))
        return default

    def raise_problems(self) -> None:
        """Raise PlanError with all problems, if there are any."""
        if self.problems:
            raise PlanError(self.problems)


def ranks_of_this_machine(default: int) -> int:
    """How many ranks of the run share this machine, as ``LOCAL_WORLD_SIZE`` says. Raises PlanError."""
    reader = EnvironmentReader()
    number = reader.number("LOCAL_WORLD_SIZE", default, least=1)
    reader.raise_problems()
    return number
