"""The files of a run before its first step: its spec, origins and tokenizer, and the record of its start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefw.core.data import TOKENIZER
from moefw.models.huggingface.handed_on import BASE_CONFIG, CHAT, CONFIG, hand_on
from moefw.system.stamps import stamp
from moefw.training.folder import kept_spec
from moefw.training.full_disk import RunFiles
from moefw.training.records.events import EVENTS, last_layout
from moefw.training.records.origins import ORIGINS, write_origins
from moefw.training.records.run_log import RunLog
from moefw.training.resolved_spec import write_resolved
from moefw.training.session import Session
from moefw.training.start import Start


def open_files(session: Session, start: Start, log: RunLog, files: RunFiles, about: Mapping[str, Any]) -> list[str]:
    """Changes in the spec of a resumed run, after the files of the run are written and its ``log`` is open.

    The log begins with the start of the run, and what is known ``about`` it. Nothing is done on ranks that do not lead.
    """
    if not session.leads:
        return []
    stamp("opening the run's files", slow=True)
    run_dir = session.run_dir
    layout_before = last_layout(run_dir / EVENTS)
    changes = _write_spec(session, files)
    _write_tokenizer(session, files)
    log.open(run_dir, keep_until=start.step if start.resumes else None, writing=files.writing)
    if start.checkpoint is None:
        log.event("start", start.step, **about)
        return changes
    log.event(
        "resume",
        start.step,
        **about,
        checkpoint=session.in_run_dir(start.checkpoint),
        lost_steps=log.lost_steps,
        layout_before=layout_before,
        changes=changes,
        **start.not_carried_on,
    )
    return changes


def _write_spec(session: Session, files: RunFiles) -> list[str]:
    """Write the spec and what it was made of. Return its changes since the run was begun."""
    assembly = session.assembly
    run_dir = session.run_dir
    changes: list[str] = []
    with files.writing(run_dir / "spec.yaml"):
        run_dir.mkdir(parents=True, exist_ok=True)
        changes = write_resolved(assembly, run_dir)
    with files.writing(run_dir / ORIGINS):
        write_origins(run_dir / ORIGINS, assembly.origins.of(kept_spec(assembly)))
    return changes


def _write_tokenizer(session: Session, files: RunFiles) -> None:
    """Write the tokenizer, and hand on the configuration and chat files beside the weights that the run begins with."""
    run_dir = session.run_dir
    weights = session.assembly.spec.train.weights
    with files.writing(run_dir / TOKENIZER):
        session.data.save_tokenizer(run_dir)
        if weights is not None:
            for name in CHAT:
                if not (run_dir / name).exists():  # the data may have one of their own
                    hand_on(Path(weights) / name, run_dir / name)
            hand_on(Path(weights) / CONFIG, run_dir / BASE_CONFIG)
