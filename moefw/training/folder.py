"""The folder of a run: what must be true of it before a process is started."""

from __future__ import annotations

import os
from pathlib import Path

from moefw.core.assembly import Assembly
from moefw.core.errors import CheckpointError, SpecError

MANIFEST = "manifest.json"


def checkpoint_dirs(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the committed checkpoints of a run as (step, folder), oldest first."""
    found = []
    for folder in (run_dir / "checkpoints").glob("step-*"):
        number = folder.name.removeprefix("step-")
        if number.isdigit() and (folder / MANIFEST).is_file():
            found.append((int(number), folder))
    return sorted(found)


def last_checkpoint(run_dir: Path) -> Path:
    """Return the newest committed checkpoint. Raises CheckpointError if there is none."""
    saved = checkpoint_dirs(run_dir)
    if not saved:
        what = f"{run_dir} holds no checkpoint."
        raise CheckpointError(what, "Check the path; train without --resume to start a run there.")
    return saved[-1][1]


def make_ready(assembly: Assembly, *, resume: bool) -> str | None:
    """Make room for a run: with ``resume`` there must be a checkpoint, without it an earlier run is moved aside.

    Returns a line to tell the user, if anything was done. Raises CheckpointError or SpecError.
    """
    run_dir = Path(assembly.spec.run.dir)
    if resume:
        last_checkpoint(run_dir)
        return None
    try:
        if run_dir.exists() and any(run_dir.iterdir()):
            aside = next(
                p for p in (run_dir.with_name(f"{run_dir.name}.{n}") for n in range(1, 10**6)) if not p.exists()
            )
            run_dir.rename(aside)
            return f"{run_dir} held an earlier run: it is now {aside}"
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"run.dir {run_dir} cannot be written: {reason}.", "Use another run.dir.") from error
    return None


def cache_dir() -> Path:
    """Return where prepared data is kept: ``$MOEFW_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("MOEFW_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moefw"
