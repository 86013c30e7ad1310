"""Buffers in memory-mapped files without a name, which the system frees however the process ends."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO, final

import torch
from torch import Tensor

from moefw.core.errors import PlanError, RunError
from moefw.runtime.memory.host import in_host_memory


@final
class UnnamedFiles:
    """Allocates one file per buffer. Raises PlanError where no file can be created in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._open().close()
        except OSError as error:
            what = f"memory policy offload cannot write to path {str(folder)!r}: {error.strerror}."
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            fix = "Make the folder" if missing else "Give this user the right to write there"
            raise PlanError(what, f"{fix}, or name another one, on every machine of the run.") from error

    def __call__(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` that are mapped to a file. Raises RunError where the disk has no room for them.

        Disk space is allocated at once: a disk that fills up in the middle of a copy kills the process.
        """
        with self._open() as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                what = f"memory policy offload: no room for {nbytes} more bytes in path {str(self._folder)!r}"
                fix = "Free some, name a larger disk, or offload less (fraction, regions)."
                raise RunError(f"{what}: {error.strerror}.", fix) from error
            with in_host_memory():
                return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)

    def _open(self) -> IO[bytes]:
        """Open a file that never had a name, or whose name is removed where the file system has no unnamed files."""
        return tempfile.TemporaryFile(dir=self._folder)
