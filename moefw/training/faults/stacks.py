"""The stacks of ranks that hang, kept in the folder of the run."""

from __future__ import annotations

import errno
import faulthandler
import os
import shutil
from pathlib import Path
from typing import Final

from moefw.system.files import replaced_file

STACKS = "stacks"
_OUTERMOST: Final = ("in <module>\n", "in _run_module_as_main\n", "  ...\n")
"""Ends of the stack of a main thread: a script, ``python -m``, and what is deeper than faulthandler writes."""


def keep_own(run_dir: Path, rank: int) -> str:
    """Write the stacks of this process's threads; return where they are, or why they could not be written."""
    try:
        folder = _folder(run_dir)
        with replaced_file(folder / f"rank-{rank}.txt") as scratch, scratch.open("wb") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
        return _why_not(error)
    return _where(folder)


def keep_others(files: list[Path], run_dir: Path) -> str:
    """Copy files of stacks to the folder of the run; return where they are, or why they could not be copied."""
    try:
        folder = _folder(run_dir)
        for file in files:
            with replaced_file(folder / file.name) as scratch:
                shutil.copyfile(file, scratch)
    except OSError as error:
        return _why_not(error)
    return _where(folder)


def is_whole(stacks: str) -> bool:
    """Whether stacks that faulthandler wrote go on to the outermost frame of the main thread, which it writes last.

    They break off while faulthandler is still writing, and where it read a frame that another thread was changing.
    """
    return stacks.endswith(_OUTERMOST)


def _folder(run_dir: Path) -> Path:
    folder = run_dir / STACKS
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():  # a rank may hang before the run's folder is searched for links
        raise OSError(errno.ELOOP, f"the folder {STACKS} of the run is a link")
    return folder


def _where(folder: Path) -> str:
    return f"The stacks of the ranks are in {folder}."


def _why_not(error: OSError) -> str:
    return f"Their stacks could not be kept: {(error.strerror or os.strerror(error.errno or 0)).lower()}."
