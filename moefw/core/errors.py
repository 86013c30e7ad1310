"""Exceptions. Every error carries problems, each with a place, a reason and a fix."""

from __future__ import annotations

import difflib
import errno
import re
import resource
from collections.abc import Iterable
from typing import Final

from attrs import frozen

MOST_LISTED: Final = 16
"""The most known names that an error lists; of more, it lists the nearest."""
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but for tab and newline, separators of lines, and what changes the direction of writing."""


def printable(text: str) -> str:
    """Text with Python's escapes in the place of characters that a terminal, or a reader's eye, obeys."""
    return _CONTROL.sub(lambda control: ascii(control[0])[1:-1], text)


@frozen
class Problem:
    """One problem, worded so that the user can fix it.

    ``where`` is ``file:line:column key.path``, or empty if the problem has no place. ``what`` names the value and the
    reason. ``fix`` says what to do and may be empty. It prints without control characters, as names are of others.
    """

    what: str
    fix: str = ""
    where: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return printable(f"{text} {self.fix}" if self.fix else text)


class MoefwError(Exception):
    """Base of all errors that moefw raises on purpose.

    ``exit_code`` is that of the command line: 2 for wrong input, 1 for a failed run, 75 for a run that a signal stopped
    and ``--resume`` continues. ``on_every_rank``: every rank raises it, with the same problems, so that one report is
    enough.
    """

    exit_code = 2

    def __init__(
        self, problems: str | Problem | Iterable[Problem], fix: str = "", *, on_every_rank: bool = False
    ) -> None:
        if isinstance(problems, str):
            problems = (Problem(problems, fix),)
        elif isinstance(problems, Problem):
            problems = (problems,)
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.on_every_rank = on_every_rank
        super().__init__("\n".join(map(str, self.problems)))


class SpecError(MoefwError):
    """The spec file, an override on the command line, or a path that they name is wrong."""


class PluginError(MoefwError):
    """A plugin is unknown, ambiguous, fails to import, or breaks the hook interface."""


class PlanError(MoefwError):
    """The parts of a spec do not fit each other, the model, or the machine."""


class DataError(MoefwError):
    """A corpus, tokenizer or token file is missing, empty or damaged."""


class DamagedDataError(DataError):
    """Prepared data is damaged. A rank may find this alone, in the middle of a run."""

    exit_code = 1


class CheckpointError(MoefwError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class ContractError(MoefwError):
    """A part broke its contract at run time."""

    exit_code = 1


class RunError(MoefwError):
    """A run failed: a rank died, a loss is not finite."""

    exit_code = 1


def os_reason(error: OSError) -> str:
    """Reason of an error of the operating system, in words that go on a sentence."""
    reason = (error.strerror or str(error)).lower()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
        return f"{reason}: this process may write {limit:,} bytes into a file (ulimit -f)"
    return reason


def closest(name: str, known: Iterable[str]) -> str | None:
    """Known name of which ``name`` is a likely misspelling, or None."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """``Did you mean 'x'?``, or the known names (of many, the nearest) if none is close, to end an error."""
    choices = sorted(known)
    close = closest(name, choices)
    if close is not None:
        return f"Did you mean {close!r}?"
    if not choices:
        return ""
    if len(choices) <= MOST_LISTED:
        return f"Known: {', '.join(choices)}."
    return f"Nearest: {', '.join(difflib.get_close_matches(name, choices, 5, cutoff=0.0))}."
