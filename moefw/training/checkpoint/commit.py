"""Checkpoints are created and removed by renames, so that a run killed at any moment has complete checkpoints.

``step-N.tmp`` is being written, ``step-N.replaced`` is being replaced by another one of its step, ``.step-N.discarded``
is being deleted, and ``step-N.aside`` is later than the step that a run went back to.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from moefw.core.errors import RunError
from moefw.training.folder import MANIFEST, checkpoint_dirs


def begin(scratch: Path) -> None:
    """Create an empty folder to write a checkpoint in, and clean up after killed runs."""
    scratch.parent.mkdir(parents=True, exist_ok=True)
    for left in list(scratch.parent.iterdir()):
        if re.fullmatch(r"step-[0-9]+\.tmp|\.step-.*\.discarded", left.name):
            shutil.rmtree(left, ignore_errors=True)
        elif re.fullmatch(r"step-[0-9]+\.replaced", left.name):
            _give_place(left)
    scratch.mkdir()


def commit(scratch: Path, manifest: bytes, final: Path) -> None:
    """Make a written folder the checkpoint ``final``. Sync its content before the rename and its name after."""
    (scratch / MANIFEST).write_bytes(manifest)
    sync(scratch / MANIFEST)
    sync(scratch)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    scratch.rename(final)
    sync(final.parent)
    sync(final.parent.parent)
    if replaced.exists():
        discard(replaced)


def delete(folder: Path) -> None:
    """Delete as much of a folder as can be deleted."""
    shutil.rmtree(folder, ignore_errors=True)


def prune(run_dir: Path, *, keep: int, keep_every: int = 0, delete: Callable[[Path], None] = delete) -> None:
    """Drop all but the newest ``keep`` checkpoints, and those of each ``keep_every``-th step; 0: of none.

    One that cannot be renamed stays. ``delete`` deletes a folder that has lost its name.
    """
    for step, folder in checkpoint_dirs(run_dir)[:-keep]:
        if keep_every and step % keep_every == 0:
            continue
        with suppress(OSError):
            discard(folder, delete)


def discard(folder: Path, delete: Callable[[Path], None] = delete) -> None:
    """Rename a checkpoint and delete it, so that no reader finds a part of it."""
    gone = folder.with_name(f".{folder.name}.discarded")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    delete(gone)


def set_aside_after(run_dir: Path, step: int) -> list[str]:
    """Rename the checkpoints after a step, so that no run resumes from them. Return a line for the user on each."""
    said = []
    for later, folder in checkpoint_dirs(run_dir):
        if later > step:
            names = (f"step-{later}.aside" + (f".{number}" if number else "") for number in count())
            aside = next(path for path in map(folder.with_name, names) if not path.exists())
            try:
                folder.rename(aside)
            except OSError as error:
                what = f"{folder} lies after step {step} and cannot be renamed: {(error.strerror or '').lower()}."
                raise RunError(what, "Move it to another place.") from error
            said.append(f"the checkpoint of step {later} is set aside: {aside}")
    return said


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_place(replaced: Path) -> None:
    """Finish an interrupted replacement: keep the new checkpoint if it has its name, else restore the old one."""
    final = replaced.with_name(replaced.name.removesuffix(".replaced"))
    if final.exists():
        discard(replaced)
    else:
        replaced.rename(final)
