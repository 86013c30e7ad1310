"""The checkpoints of a run: when one is saved, how, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import final

from moefw.core.errors import MoefwError
from moefw.training import checkpoint
from moefw.training.clock import StepClock
from moefw.training.engine import Votes
from moefw.training.feed import Feed
from moefw.training.full_disk import RunFiles
from moefw.training.host_pages import return_free_pages
from moefw.training.periods import is_due
from moefw.training.records.run_log import RunLog
from moefw.training.session import Session


@final
class RunCheckpoints:
    """Saves the checkpoints of a run, while training waits or beside the steps that follow, and records them.

    Its methods count steps from 0, and are collective. ``feed`` and ``base``: what checkpoints tell of the run, see
    :class:`moefw.training.checkpoint.Origin`. Time goes to ``clock``, aside of its steps; ``tell`` prints a line.
    """

    def __init__(
        self,
        session: Session,
        saver: checkpoint.Saver,
        *,
        feed: Feed,
        base: checkpoint.Base | None,
        log: RunLog,
        files: RunFiles,
        clock: StepClock,
        tell: Callable[[str], None],
    ) -> None:
        self._session = session
        self._saver = saver
        self._feed = feed
        self._base = base
        self._log = log
        self._files = files
        self._clock = clock
        self._tell = tell
        self._folder = session.run_dir / "checkpoints"
        self._newest: Path | None = None
        """The folder of the last one that this process has saved."""

    def metrics(self) -> dict[str, float]:
        """What saves have cost since the last call: see :meth:`moefw.training.checkpoint.Saver.metrics`."""
        return self._saver.metrics()

    def after_step(self, step: int, votes: Votes) -> None:
        """Settle the save that goes on beside steps if the ranks' ``votes`` decide it, and save if that is due."""
        train = self._session.assembly.spec.train
        if votes.decided(self._session.layout.plan.world):
            self.settle()
        if is_due(train, step, every=train.checkpoint_every):
            self.settle()
            self._save(step, is_last=step + 1 == train.steps)

    def save_to_stop(self, step: int) -> Path:
        """Folder of the checkpoint after ``step``, which is saved here unless it is already."""
        folder = self._folder / f"step-{step + 1}"
        self.settle()
        if self._newest != folder:
            self.save_now(step)
        return folder

    def save_now(self, step: int) -> None:
        """Save a checkpoint after ``step`` while training waits."""
        with self._clock.aside("checkpoint"):
            saved = self._saver.save(step + 1, self._origin(step))
            return_free_pages()
        self._record(saved)

    def settle(self) -> None:
        """Wait for the save that goes on beside steps, if there is one, and record its checkpoint."""
        if not self._saver.goes_on:
            return
        with self._files.writing(self._folder):
            with self._clock.aside("checkpoint"):
                saved = self._saver.settled()
                return_free_pages()
            self._record(saved)

    @contextmanager
    def settled_at_failure(self) -> Iterator[None]:
        """Settle the save that goes on beside steps also if the code inside fails, where it fails on every rank."""
        try:
            yield
        except MoefwError as error:
            if error.on_every_rank:
                with suppress(MoefwError):  # the first failure is reported
                    self.settle()
            raise

    def way_back(self) -> str:
        """Advice to go back to the newest whole checkpoint, that of the save that goes on included."""
        self.settle()
        return checkpoint.way_back(self._session.run_dir, self._session.layout.host_group())

    def _save(self, step: int, *, is_last: bool) -> None:
        """Begin a save beside the steps that follow, or save now if none follows or the spec lets training wait."""
        if self._session.assembly.spec.train.checkpoint == "async" and not is_last:
            with self._clock.aside("checkpoint"):
                self._saver.begin(step + 1, self._origin(step))
            return
        # A failure at a run's last checkpoint raises under any ``on_full_disk``.
        with nullcontext() if is_last else self._files.writing(self._folder):
            self.save_now(step)

    def _record(self, saved: checkpoint.Saved) -> None:
        self._newest = saved.folder
        path = self._session.in_run_dir(saved.folder)
        self._log.event("checkpoint", saved.step, path=path, seconds=round(saved.blocked_s, 6), bytes=saved.nbytes)
        self._tell(f"saved {saved.folder}")

    def _origin(self, step: int) -> checkpoint.Origin:
        """What a checkpoint after a step tells of the run that saves it."""
        session = self._session
        return checkpoint.Origin(
            world=session.layout.plan.world,
            plugins=tuple(tuple(version) for version in session.assembly.versions()),
            tokenizer=session.data.fingerprint,
            sequences=self._feed.order.first(step + 1),
            base=self._base,
        )
