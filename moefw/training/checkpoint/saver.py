"""The saves of a run: while training waits, or beside the steps that follow, from a snapshot that a thread writes.

A save beside steps has four times:

- *begun*: the thread of each rank copies its parts. Until it has, :meth:`Saver.wait_until_read` holds back an update;
- *read*: the copies are there, and weights and states may change;
- *done*: this rank's file is on the disk, or cannot be: told in the sums of the next step (:meth:`Saver.votes`);
- *settled*: all ranks are done, or one has failed, and rank 0 commits the checkpoint, or none does.
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any, final

import torch
from attrs import define, field, frozen
from torch import nn

from moefw.core.contracts import Layout
from moefw.core.errors import RunError
from moefw.runtime.finite import is_finite
from moefw.system.stamps import stamp
from moefw.training.checkpoint.commit import delete
from moefw.training.checkpoint.files import file_of, write
from moefw.training.checkpoint.manifest import Origin
from moefw.training.checkpoint.parts import Part, parts_of
from moefw.training.checkpoint.saving import (
    begin_together,
    commit_together,
    report,
    require_finite,
    save,
    scratch_of,
)
from moefw.training.checkpoint.snapshot import Snapshot
from moefw.training.errors import NotWrittenError


@frozen(kw_only=True)
class Saved:
    """A checkpoint that has been committed. ``blocked_s``: the time that training has waited for it on this rank.

    ``nbytes``: what this rank has written of it.
    """

    step: int
    folder: Path
    blocked_s: float
    nbytes: int


@define(eq=False, kw_only=True)
class _Flight:
    """A save beside steps. ``report``, ``bad`` and ``error`` are its outcome on this rank, once it is ``done``."""

    step: int
    origin: Origin
    scratch: Path
    blocked_s: float = 0.0
    report: dict[str, Any] | None = None
    bad: str | None = None
    error: Exception | None = None
    read: threading.Event = field(factory=threading.Event)
    done: threading.Event = field(factory=threading.Event)

    def end(self) -> None:
        """Tell that nothing more is read or written on this rank."""
        self.read.set()
        self.done.set()

    @property
    def failed(self) -> bool:
        """Whether this rank cannot save, once it is done."""
        return self.error is not None or self.bad is not None


@final
class Saver:
    """Saves the checkpoints of a run; one save at a time goes on beside steps."""

    def __init__(
        self,
        run_dir: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        *,
        keep: int,
        keep_every: int = 0,
    ) -> None:
        self._run_dir = run_dir
        self._model = model
        self._optimizer = optimizer
        self._layout = layout
        self._kept = {"keep": keep, "keep_every": keep_every}
        self._snapshot = Snapshot(next(model.parameters()).device)
        self._flight: _Flight | None = None
        self._untold_s = 0.0
        self._untold_bytes = 0

    def metrics(self) -> dict[str, float]:
        """Seconds that training has waited for checkpoints since the last call, and bytes of those committed; or {}."""
        told = {"checkpoint_blocked_s": round(self._untold_s, 6), "checkpoint_bytes": self._untold_bytes}
        self._untold_s = 0.0
        self._untold_bytes = 0
        return told if any(told.values()) else {}

    @property
    def goes_on(self) -> bool:
        """Whether a save beside steps is not settled."""
        return self._flight is not None

    def votes(self) -> tuple[float, float]:
        """1.0 and 0.0 if this rank's share of a save beside steps is done, 0.0 and 1.0 if it failed, else zeros."""
        flight = self._flight
        if flight is None or not flight.done.is_set():
            return 0.0, 0.0
        return float(not flight.failed), float(flight.failed)

    def wait_until_read(self) -> None:
        """Return once the snapshot has been taken, so that weights and states may change."""
        flight = self._flight
        if flight is not None and not flight.read.is_set():
            stamp("waiting for a checkpoint to be copied")
            began_s = time.perf_counter()
            flight.read.wait()
            self._blocked(flight, began_s)

    def save(self, step: int, origin: Origin) -> Saved:
        """Save while training waits, when no other save goes on. Collective.

        Raises as :func:`moefw.training.checkpoint.saving.save`.
        """
        assert self._flight is None, "one save at a time"
        began_s = time.perf_counter()
        folder = save(self._run_dir, step, self._model, self._optimizer, self._layout, origin, **self._kept)
        blocked_s = time.perf_counter() - began_s
        self._untold_s += blocked_s
        return self._saved(step, folder, blocked_s)

    def begin(self, step: int, origin: Origin) -> None:
        """Begin a save beside the steps that follow, when no other one goes on. Collective.

        If it fails, on any rank, :meth:`settled` tells.
        """
        assert self._flight is None, "one save at a time"
        began_s = time.perf_counter()
        stamp("beginning a checkpoint")
        flight = _Flight(step=step, origin=origin, scratch=scratch_of(self._run_dir, step))
        self._flight = flight
        try:
            begin_together(flight.scratch, self._layout)
        except NotWrittenError as error:
            flight.error = error
            flight.end()
        else:
            parts = parts_of(self._model, self._optimizer, self._layout)
            arguments = (flight, parts, self._snapshot.now())
            # A daemon: a process that has failed ends, though its disk hangs.
            threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
        self._blocked(flight, began_s)

    def _write(self, flight: _Flight, parts: list[Part], after: Any) -> None:
        """Copy, check and write this rank's parts. Runs in the thread, which asks no rank and stamps nothing."""
        try:
            copies = self._snapshot.taken(parts, after)
            flight.read.set()
            flight.bad = next((part.name for part in copies if not is_finite(part.values)), None)
            if flight.bad is None and copies:
                saved = write(flight.scratch / file_of(self._layout.rank), copies, lambda phase: None)
                flight.report = report(saved, copies)
        except Exception as error:
            flight.error = error
        finally:
            flight.end()

    def settled(self) -> Saved:
        """Wait for the save that goes on beside steps, and commit it. Collective.

        Raises RunError on every rank if a value was not finite on one, and NotWrittenError if one could not write.
        Nothing is committed then.
        """
        flight = self._flight
        assert flight is not None, "no save goes on"
        began_s = time.perf_counter()
        stamp(f"writing the checkpoint of step {flight.step} to the disk")
        flight.done.wait()
        self._flight = None
        try:
            require_finite(self._run_dir, flight.step, flight.bad, self._layout)
        except RunError:
            if self._layout.rank == 0:
                shutil.rmtree(flight.scratch, ignore_errors=True)
            raise

        def reported() -> dict[str, Any] | None:
            if flight.error is not None:
                raise flight.error
            return flight.report

        folder = commit_together(
            reported, flight.scratch, flight.step, flight.origin, self._layout, **self._kept, delete=_delete_beside
        )
        self._blocked(flight, began_s)
        return self._saved(flight.step, folder, flight.blocked_s)

    def _saved(self, step: int, folder: Path, blocked_s: float) -> Saved:
        file = folder / file_of(self._layout.rank)
        nbytes = file.stat().st_size if file.exists() else 0  # a rank may have nothing to write
        self._untold_bytes += nbytes
        return Saved(step=step, folder=folder, blocked_s=blocked_s, nbytes=nbytes)

    def _blocked(self, flight: _Flight, began_s: float) -> None:
        """Count the time since ``began_s`` as one in which training has waited for a save."""
        seconds = time.perf_counter() - began_s
        flight.blocked_s += seconds
        self._untold_s += seconds


def _delete_beside(folder: Path) -> None:
    """Delete a folder while training goes on. If the process ends before, the next save deletes the rest."""
    threading.Thread(target=delete, args=(folder,), name="deletion of a checkpoint", daemon=True).start()
