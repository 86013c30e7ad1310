"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moefw.core.errors import CheckpointError


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write in, which gets the name ``target`` in the end. If writing fails, nothing is left of it.

    Raises CheckpointError if ``target`` holds something, or if it cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there and is no empty folder.", "Name a new folder.")
    scratch = target.with_name(f"{target.name}.tmp")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        if target.is_dir():
            target.rmdir()
        scratch.rename(target)
    except OSError as error:
        what = f"{target} cannot be written: {(error.strerror or str(error)).lower()}."
        raise CheckpointError(what, "Name another folder.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
