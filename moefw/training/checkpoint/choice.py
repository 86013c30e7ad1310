"""Choice of the checkpoint that a run resumes from, and advice on a damaged one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from moefw.core.errors import CheckpointError
from moefw.training.checkpoint.manifest import Damage, read_manifest
from moefw.training.checkpoint.shards import verify
from moefw.training.folder import checkpoint_dirs
from moefw.training.resume import Which, candidates


@frozen(kw_only=True)
class Chosen:
    """Checkpoint to resume from: its step, its folder, the digest of its manifest, and why newer ones were skipped."""

    step: int
    folder: Path
    digest: str
    passed: tuple[str, ...] = ()


def choose(run_dir: Path, which: Which) -> Chosen | None:
    """Return the checkpoint of a run to resume from, None if ``auto`` starts anew.

    Raises CheckpointError if there is none. Only ``last-good`` checks its tensors here; loading always does.
    """
    found = candidates(run_dir, which)
    passed: list[str] = []
    for step, folder in found:
        if which != "last-good":
            with way_out(folder):
                return Chosen(step=step, folder=folder, digest=read_manifest(folder).digest)
        try:
            verify(folder)
            return Chosen(step=step, folder=folder, digest=read_manifest(folder).digest, passed=tuple(passed))
        except Damage as damage:
            passed.append(str(damage))
    if passed:
        what = f"no checkpoint of {run_dir} is whole. {' '.join(passed)}"
        raise CheckpointError(what, "Restore one from a copy, or train anew without --resume.")
    return None


@contextmanager
def way_out(folder: Path) -> Iterator[None]:
    """Raise damage to a checkpoint as a CheckpointError that names the newest intact checkpoint of the run."""
    try:
        yield
    except Damage as damage:
        raise CheckpointError(str(damage), damage.fix or _offer(folder)) from damage


def _offer(damaged: Path) -> str:
    for step, folder in reversed(checkpoint_dirs(damaged.parent.parent)):
        if folder != damaged and _is_whole(folder):
            return f"The checkpoint of step {step} is whole: train on with --resume=last-good or --resume={step}."
    return "No other checkpoint of the run is whole: restore this one from a copy, or train anew without --resume."


def _is_whole(folder: Path) -> bool:
    try:
        verify(folder)
    except Damage:
        return False
    return True
