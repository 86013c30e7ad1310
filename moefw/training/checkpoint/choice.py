"""Choice of the checkpoint that all ranks resume from, and advice on a damaged one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen
from torch.distributed import ProcessGroup

from moefw.compose.spec.source import show
from moefw.core.data import DataSource
from moefw.core.errors import CheckpointError, PlanError, Problem
from moefw.runtime.communication.agreement import everywhere, raise_together
from moefw.training.checkpoint.manifest import Damage
from moefw.training.checkpoint.reading import opened, read_manifest
from moefw.training.folder import checkpoint_dirs
from moefw.training.resume import Which, candidates


@frozen(kw_only=True)
class Chosen:
    """Checkpoint to resume from: its step, its folder, the digest of its manifest, and why newer ones were skipped."""

    step: int
    folder: Path
    digest: str
    passed: tuple[str, ...] = ()


def choose(run_dir: Path, which: Which, group: ProcessGroup | None = None) -> Chosen | None:
    """Checkpoint of a run to resume from, None if ``auto`` starts anew.

    Raises CheckpointError if there is none. Only ``last-good`` checks tensors here, and the ranks of ``group`` share
    this work: collective then. Loading checks what it reads.
    """
    to_try = candidates(run_dir, which)
    passed: list[str] = []
    for step, folder in to_try:
        if which != "last-good":
            with way_out(folder):
                return Chosen(step=step, folder=folder, digest=read_manifest(folder).digest)
        digest, damage = _checked_together(folder, group)
        if damage is None:
            return Chosen(step=step, folder=folder, digest=digest, passed=tuple(passed))
        passed.append(damage)
    if passed:
        what = f"no checkpoint of {run_dir} is whole. {' '.join(passed)}"
        raise CheckpointError(what, "Restore one from a copy, or train anew without --resume.")
    return None


def _checked_together(folder: Path, group: ProcessGroup | None) -> tuple[str, str | None]:
    """Digest of a checkpoint, and the first damage that a rank has found in its share of the files. Collective."""
    index, count = (0, 1) if group is None else (group.rank(), group.size())
    digest = ""
    damage = None
    try:
        reader = opened(folder)
        digest = reader.manifest.digest
        reader.verify(index, count)
    except Damage as own:
        damage = str(own)
    return digest, next((told for told in everywhere(damage, group) if told is not None), None)


@contextmanager
def way_out(folder: Path) -> Iterator[None]:
    """Raise damage to a checkpoint as a CheckpointError that names the newest intact checkpoint of the run."""
    try:
        yield
    except Damage as damage:
        raise CheckpointError(str(damage), damage.fix or another(folder)) from damage


def another(bad: Path) -> str:
    """Advice to take the newest whole checkpoint of a run instead of a bad one, if there is one."""
    return _advice(bad.parent.parent, but=bad) or (
        "No other checkpoint of the run is whole: restore this one from a copy, or train anew without --resume."
    )


def way_back(run_dir: Path, group: ProcessGroup | None) -> str:
    """Advice to go back to the newest whole checkpoint of a run, if there is one. Collective.

    The first rank looks for it, which takes as long as reading it.
    """
    leads = group is None or group.rank() == 0
    advice: str = everywhere(_advice(run_dir) if leads else "", group)[0]
    return advice or "No checkpoint of the run is whole: train anew without --resume."


def _advice(run_dir: Path, but: Path | None = None) -> str:
    for step, folder in reversed(checkpoint_dirs(run_dir)):
        if folder != but and _is_whole(folder):
            return f"The checkpoint of step {step} is whole: train on with --resume=last-good or --resume={step}."
    return ""


def _is_whole(folder: Path) -> bool:
    try:
        opened(folder).verify()
    except Damage:
        return False
    return True


def choose_together(run_dir: Path, which: Which | None, data: DataSource, group: ProcessGroup | None) -> Chosen | None:
    """Checkpoint that every rank resumes from, None if all start anew. Collective.

    ``which`` None: this rank was not asked to resume. Raises the first rank's CheckpointError on all ranks, and
    PlanError with the differences if ranks were asked for different checkpoints, or see different checkpoints or data.
    """
    chosen = None
    error = None
    # Ranks that were asked for something else, or see other checkpoints, share no work. What differs is told below.
    asked = everywhere([which, [step for step, _ in checkpoint_dirs(run_dir)]], group)
    agree = all(each == asked[0] for each in asked)
    try:
        chosen = None if which is None else choose(run_dir, which, group if agree else None)
    except CheckpointError as found:
        error = found
    raise_together(error, group)
    own = {
        "what --resume asks for": which,
        "the step to go on from": chosen.step if chosen else 0,
        "the manifest of that checkpoint": chosen.digest if chosen else None,
        "the number of tokens to train on": len(data.train),
        "the prepared data": data.digest,
    }
    answers = everywhere(own, group)
    fix = "Let every rank see the same run.dir and the same text, or resume at a step that all have: --resume=N."
    problems = [
        Problem(
            f"rank {rank} differs from rank 0 in {what}: {show(there[what])} instead of {show(answers[0][what])}.", fix
        )
        for rank, there in enumerate(answers)
        for what in own
        if there[what] != answers[0][what]
    ]
    if problems:
        raise PlanError(problems)
    return chosen
