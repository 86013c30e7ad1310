"""Handling of files of the run that cannot be written: the run ends, or continues with a note."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, final

from moefw.core.errors import os_reason
from moefw.training.errors import NotWrittenError


@final
class RunFiles:
    """Guards writes of files that training does not need: metrics, events, the spec. ``note`` prints a line.

    ``told`` is called with the first failure of each file, before it raises or is noted: its path and the reason.
    """

    def __init__(
        self,
        on_full_disk: Literal["stop", "continue"],
        note: Callable[[str], None],
        told: Callable[[Path, str], None] = lambda path, reason: None,
    ) -> None:
        self._on_full_disk = on_full_disk
        self._note = note
        self._told = told
        self._unwritten: set[Path] = set()

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Guard writes of ``path``. A failure raises under ``stop``; under ``continue`` the first one is noted."""
        try:
            with written(path):
                yield
        except NotWrittenError as error:
            first = path not in self._unwritten
            self._unwritten.add(path)
            if first:
                self._told(path, error.problems[0].what)
            if self._on_full_disk == "stop":
                raise
            if first:
                self._note(f"{error.problems[0].what} Training goes on (train.on_full_disk).")
        else:
            if path in self._unwritten:
                self._note(f"{path} is written again.")
            self._unwritten.discard(path)


def remedy(error: OSError) -> str:
    """What lets a file be written after it could not be: the beginning of a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Make room"
    if error.errno == errno.EFBIG:
        return "Allow larger files"
    return "Make it writable"


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Guard writes of ``path``. Raises NotWrittenError if one fails."""
    try:
        yield
    except OSError as error:
        reason = os_reason(error)
        fix = f"{remedy(error)} and run again with --resume=auto; train.on_full_disk=continue trains on meanwhile."
        raise NotWrittenError(f"{path} cannot be written: {reason}.", fix) from error
