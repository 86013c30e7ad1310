"""A trained model, opened from a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moefw.compose.assembly import Assembly
from moefw.compose.pretrained import read_weights
from moefw.core.errors import CheckpointError, RunError
from moefw.training import checkpoint
from moefw.training.errors import NotFiniteError
from moefw.training.faults.bad_values import bad_state
from moefw.training.resume import candidates
from moefw.training.session import Session, open_session
from moefw.training.world import Place

TRIES: Final = 5


@contextmanager
def open_trained(assembly: Assembly) -> Iterator[tuple[Session, int, list[str]]]:
    """Open the last checkpoint of the run on this process alone; yield the session, the step it was saved at,
    and a line on each kind of state that it lacks, or that nothing here keeps.

    A training run may drop it meanwhile. Then the checkpoint that is the last by then is read. A NotFiniteError of the
    caller is raised as a RunError with its cause.
    """
    run_dir = Path(assembly.spec.run.dir)
    candidates(run_dir, "last")
    with open_session(assembly, Place(0, 1, 0, 1)) as session:
        base = checkpoint.base_of(assembly, None)
        loaded, folder = _load_last(run_dir, session, base)
        if base is not None:
            read_weights(session.model, Path(base.folder), assembly, None, frozen_alone=True)
        try:
            yield session, loaded.manifest.step, [*loaded.differences.notes(folder.name)]
        except NotFiniteError as error:
            raise _explained(error, session, folder) from error


def _explained(error: NotFiniteError, session: Session, folder: Path) -> RunError:
    """Error with its cause: the first weight that is not finite, and a checkpoint that is."""
    (problem,) = error.problems
    bad = bad_state(session.model)
    if bad is not None:
        return RunError(f"{folder}: {problem.what} {bad.what}.", checkpoint.another(folder))
    what = f"{folder}: {problem.what} Every weight is finite, so values overflow between them."
    return RunError(what, "Compute with more range: precision={use: fp32}.")


def _load_last(run_dir: Path, session: Session, base: checkpoint.Base | None) -> tuple[checkpoint.Loaded, Path]:
    """The checkpoint that was read, and its folder."""
    for _ in range(TRIES):
        ((_, folder),) = candidates(run_dir, "last")
        try:
            fingerprint = session.data.fingerprint
            return checkpoint.load(folder, session.model, None, tokenizer=fingerprint, base=base), folder
        except CheckpointError:
            if folder.exists():
                raise
    what = f"checkpoints of {run_dir} were dropped while they were read, {TRIES} times."
    raise CheckpointError(what, "Raise train.keep_checkpoints, or try again when the run has ended.")
