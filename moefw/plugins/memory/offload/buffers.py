"""Buffers in host memory, and in files without a name, which the system frees however the process ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, final

import torch
from torch import Tensor

from moefw.core.errors import PlanError, RunError
from moefw.runtime.accounting import in_host_memory

ACTIVATIONS = ("memory policy offload", "activations", "Offload less (fraction, regions), or use to: nvme.")
"""Who allocates, for what, and what to do if there is no memory."""
STATES = (
    "memory policy optimizer-offload",
    "states of the optimizer",
    "Add optimizer-bf16, shard more, or leave it out.",
)


def host_memory(*, pinned: bool, words: tuple[str, str, str] = ACTIVATIONS) -> Callable[[int], Tensor]:
    """Function that allocates ``nbytes``; ``pinned``: page-locked, so that a GPU copies at full speed.

    ``words`` of the RunError that it raises where there is no memory: who allocates, for what, and the fix.
    """
    who, purpose, fix = words

    def allocate(nbytes: int) -> Tensor:
        try:
            with in_host_memory():
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            kind = "page-locked host memory" if pinned else "host memory"
            first_line = str(error).partition("\n")[0]
            raise RunError(
                f"{who}: {nbytes} bytes of {kind} for {purpose} cannot be had ({first_line}).", fix
            ) from error

    return allocate


@final
class UnnamedFiles:
    """Allocates one file per buffer. Raises PlanError where no file can be created in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._open().close()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            fix = "Make the folder" if missing else "Give this user the right to write there"
            raise PlanError(
                f"memory policy offload cannot write to path {str(folder)!r}: {error.strerror}.",
                f"{fix}, or name another one, on every machine of the run.",
            ) from error

    def __call__(self, nbytes: int) -> Tensor:
        """``nbytes`` that are mapped to a file. Raises RunError where the disk has no room for them.

        Disk space is allocated at once: a disk that fills up in the middle of a copy kills the process.
        """
        with self._open() as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise RunError(
                    f"memory policy offload: no room for {nbytes} more bytes in path {str(self._folder)!r}: "
                    f"{error.strerror}.",
                    "Free some, name a larger disk, or offload less (fraction, regions).",
                ) from error
            with in_host_memory():
                return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)

    def _open(self) -> IO[bytes]:
        """Open a file that never had a name, or whose name is removed where the file system has no unnamed files."""
        return tempfile.TemporaryFile(dir=self._folder)
