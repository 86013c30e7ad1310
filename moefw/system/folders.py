"""Folders that are filled under another name and appear whole or not at all, of temporary files, and of a cache."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from moefw.core.errors import CheckpointError, PlanError, os_reason


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write in, which gets the name ``target`` in the end. If writing fails, nothing is left of it.

    Several processes may write folders of one name: the first that ends gets it, and the others fail. ``target`` may be
    a link to an empty folder. Raises CheckpointError if ``target`` holds something, or if it cannot be written.
    """
    _refuse_taken(target)
    place = Path(os.path.realpath(target))
    try:
        with scratch_folder(place.parent) as scratch:
            yield scratch
            try:
                scratch.rename(place)  # also in the place of an empty folder, in one step
            except OSError:
                _refuse_taken(target)
                raise
    except OSError as error:
        what = f"{target} cannot be written: {os_reason(error)}."
        raise CheckpointError(what, "Name another folder.") from error


def _refuse_taken(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there and is no empty folder.", "Name a new folder.")


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder below ``parent``, to be filled and then renamed. It is removed unless it was.

    Only this process writes there: it lies in a hidden folder of mode 0700, whose name is random, and which is locked
    until it is removed. Those that killed processes of this machine have left in ``parent`` are removed first. Raises
    OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(parent)
    private, lock = _private_folder(parent)
    try:
        # What is renamed is a folder inside, whose mode is that of any folder of the user.
        scratch = private / "new"
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(private, ignore_errors=True)
        os.close(lock)


def hidden_name(parent: Path) -> Path:
    """New name for a folder in ``parent``, which counts as a leftover if no process holds a lock on it."""
    return parent / f".moefw.{_host()}.{secrets.token_hex(8)}"


def lock_folder(descriptor: int, how: int = 0) -> None:
    """Wait for the lock of an open folder; do nothing if the file system has no locks.

    ``how``: with ``fcntl.LOCK_NB``, raise BlockingIOError if another process holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
    except BlockingIOError:
        raise
    except OSError:
        pass


def _private_folder(parent: Path) -> tuple[Path, int]:
    """New hidden folder of mode 0700, and a lock on it that ends with this process."""
    while True:
        private = hidden_name(parent)
        private.mkdir(mode=0o700)
        with suppress(FileNotFoundError, BlockingIOError):  # removed as a leftover before it was locked
            lock = os.open(private, os.O_RDONLY)
            try:
                lock_folder(lock, fcntl.LOCK_NB)
                private.stat()
            except OSError:
                os.close(lock)
                raise
            return private, lock


def _remove_leftovers(parent: Path) -> None:
    """Remove the hidden folders of this machine that no process holds a lock on."""
    made_here = re.compile(rf"\.moefw\.{re.escape(_host())}\.[0-9a-f]{{16}}")
    for path in parent.iterdir():
        if made_here.fullmatch(path.name):
            with suppress(OSError):  # locked, already gone, or on a file system without locks: it may be in use
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


def temporary_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder of temporary files: ``$TMPDIR``, else the system's. Raises PlanError if it cannot be written.

    ``tempfile`` alone would pass over a ``TMPDIR`` that cannot be written.
    """
    chosen = environment.get("TMPDIR")
    try:
        folder = chosen or tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder):
            return Path(folder)
    except OSError as error:
        name = f"TMPDIR is {chosen!r}, which" if chosen else "The system's folder of temporary files"
        reason = error.strerror or str(error)  # which may name folders
        what = f"{name} cannot be written: {reason[:1].lower()}{reason[1:]}."
        raise PlanError(what, "Set TMPDIR to a folder that can be written.") from error


def cache_dir() -> Path:
    """Folder of prepared data: ``$MOEFW_CACHE``, else the user's cache folder. Raises PlanError."""
    chosen = os.environ.get("MOEFW_CACHE")
    if chosen:
        return Path(chosen)
    of_the_user = os.environ.get("XDG_CACHE_HOME")
    if of_the_user:
        return Path(of_the_user) / "moefw"
    try:
        return Path.home() / ".cache" / "moefw"
    except RuntimeError as error:
        what = "HOME is not set and this user has no home folder, so prepared data have no place."
        raise PlanError(what, "Set MOEFW_CACHE to a folder that can be written.") from error
