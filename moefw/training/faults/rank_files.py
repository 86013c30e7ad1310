"""Files for the records and stacks of a launcher's ranks, in a private folder that they share with it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moefw.training.faults.record import RECORD_BYTES

MEETING: Final = "MOEFW_MEETING"
"""Names the private folder (mode 0700, one for each attempt) of ranks that moefw's launcher started."""


def meeting_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Private folder of this rank's launcher; None if moefw's launcher did not start it."""
    folder = environment.get(MEETING)
    return Path(folder) if folder else None


def record_file(folder: Path, rank: int) -> memoryview:
    """A rank's record, shared by all processes that open it; it is empty at first."""
    descriptor = os.open(folder / f"rank-{rank}.record", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, RECORD_BYTES)
        return memoryview(mmap.mmap(descriptor, RECORD_BYTES))
    finally:
        os.close(descriptor)


def stack_file(folder: Path, rank: int) -> Path:
    """File into which a rank writes its stacks when SIGUSR2 asks for them."""
    return folder / f"rank-{rank}.txt"
