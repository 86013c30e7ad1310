"""Files that are replaced as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a new empty file in the folder of ``path``, which takes its place in the end: a reader sees no part of it.

    If writing fails, ``path`` stays as it was. A link in the place of either file is replaced or removed, never
    followed. One process may write at a time: a file that a killed one left under the same name is removed. Raises
    OSError.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.unlink(missing_ok=True)
    scratch.touch(exist_ok=False)
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
