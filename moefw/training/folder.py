"""The folder of a run: what must be true of it before a process is started."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from moefw.core.assembly import Assembly
from moefw.core.errors import CheckpointError, SpecError

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
OF_A_RUN = ("spec.yaml", "metrics.jsonl", "ledger.json", "checkpoints")
"""What tells the folder of a run from others: any of these."""


def checkpoint_dirs(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the committed checkpoints of a run as (step, folder), oldest first."""
    found = []
    for folder in (run_dir / "checkpoints").glob("step-*"):
        number = re.fullmatch(r"step-([0-9]+)", folder.name)
        if number and (folder / MANIFEST).is_file():
            found.append((int(number[1]), folder))
    return sorted(found)


def last_checkpoint(run_dir: Path) -> Path:
    """Return the newest committed checkpoint. Raises CheckpointError if there is none."""
    saved = checkpoint_dirs(run_dir)
    if not saved:
        what = f"{run_dir} holds no checkpoint."
        raise CheckpointError(what, "Check the path; train without --resume to start a run there.")
    return saved[-1][1]


@contextmanager
def run_folder(assembly: Assembly, *, resume: bool, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep a run's folder to this process. With ``resume`` it has a checkpoint, without it an earlier run gives way.

    That is moved aside, and back where the new one leaves nothing; ``tell`` gets a line for the user then. Raises
    CheckpointError where there is nothing to resume, SpecError where a run cannot be in the folder.
    """
    run_dir = Path(assembly.spec.run.dir)
    if resume:
        last_checkpoint(run_dir)
    with ExitStack() as stack:
        try:
            aside = None if resume else _moved_aside(run_dir)
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(run_dir))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise SpecError(f"run.dir {run_dir} cannot be written: {reason}.", "Use another run.dir.") from error
        stack.callback(_give_back, run_dir, aside, tell)
        if aside is not None:
            tell(f"{run_dir} held an earlier run: it is now {aside}")
        yield


def _moved_aside(run_dir: Path) -> Path | None:
    """Rename the folder of an earlier run, and return its new name; None where there is none."""
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return None
    if not any((run_dir / name).exists() for name in OF_A_RUN):
        raise SpecError(f"run.dir {run_dir} holds something else than a run.", "Use another run.dir.")
    with _locked(run_dir):
        aside = next(p for p in (run_dir.with_name(f"{run_dir.name}.{n}") for n in count(1)) if not p.exists())
        return run_dir.rename(aside)


def _give_back(run_dir: Path, aside: Path | None, tell: Callable[[str], None]) -> None:
    """Undo what was done for a run that has left nothing."""
    with suppress(OSError):
        run_dir.rmdir()  # fails where there is something in it
        if aside is not None:
            aside.rename(run_dir)
            tell(f"{aside} is {run_dir} again")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which goes with the process; nothing happens where the file system has none."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise SpecError(f"run.dir {folder} is that of a run under way.", "Use another run.dir, or stop it.") from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Return where prepared data is kept: ``$MOEFW_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("MOEFW_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moefw"
