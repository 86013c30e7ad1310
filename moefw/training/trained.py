"""A trained model, opened from a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moefw.core.assembly import Assembly
from moefw.training import checkpoint
from moefw.training.folder import last_checkpoint
from moefw.training.session import Session, open_session
from moefw.training.world import Place


@contextmanager
def open_trained(assembly: Assembly) -> Iterator[tuple[Session, int]]:
    """Open the last checkpoint of the run on this process alone; yield the session and the step it was saved at."""
    folder = last_checkpoint(Path(assembly.spec.run.dir))
    with open_session(assembly, Place(0, 1, 0, 1)) as session:
        manifest = checkpoint.load(folder, session.model, None, tokenizer=session.data.fingerprint)
        yield session, manifest["step"]
