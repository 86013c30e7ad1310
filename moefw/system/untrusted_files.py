"""Reading of files that others wrote, which may be of any kind and size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Content of a regular file, or of one behind a link, of at most ``max_bytes``.

    Raises OSError, whose ``strerror`` says why: also of a pipe or a device, which may have no end.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "It is no regular file", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"It has {status.st_size:,} bytes, and may have {max_bytes:,}", str(path))
        return file.read(max_bytes)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a plain ``open`` of a pipe waits until somebody writes into it."""
    return os.open(path, flags | os.O_NONBLOCK)
