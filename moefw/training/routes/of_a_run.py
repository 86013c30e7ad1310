"""What a run does with routes: it records its own, or replays those of another, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, final

from attrs import frozen
from torch import Tensor

from moefw.compose.routes import ROUTES
from moefw.core.stages import Batch
from moefw.system.stamps import stamp
from moefw.training.routes.file import Wanted, drop_after
from moefw.training.routes.recorder import Recorder
from moefw.training.routes.replay import Replay
from moefw.training.session import Session


@final
@frozen(eq=False)
class Routes:
    """The routes of a run on this rank."""

    recorder: Recorder | None
    replay: Replay | None

    @classmethod
    def opened(cls, session: Session, start: int) -> Self:
        """Routes of a run that has made ``start`` steps. Collective.

        Raises DataError if a file to replay is missing or another.
        """
        assembly = session.assembly
        layout = session.layout
        train = session.assembly.spec.train
        folder = Path(assembly.spec.run.dir) / ROUTES
        dims = assembly.site.dims
        if not (train.record_routes or train.replay_routes):
            return cls(None, None)
        replay = None
        if train.replay_routes is not None:
            stamp("checking routes", slow=True)
            expected = Wanted(
                layers=tuple(assembly.layers),
                num_experts=dims.num_experts,
                top_k=dims.top_k,
                sequences=train.tokens_per_step // train.seq_len,
                seq_len=train.seq_len,
            )
            replay = Replay(Path(train.replay_routes), expected, layout)
            replay.check(range(start + 1, train.steps + 1))
        if train.record_routes and layout.rank == 0:
            drop_after(folder, start)
        recorder = Recorder(folder, layout, tuple(assembly.layers), dims.top_k) if train.record_routes else None
        return cls(recorder, replay)

    def given(self, step: int, batches: list[Batch]) -> list[Batch]:
        """Micro-batches of a step (from 1), with the routes that are replayed. Collective."""
        return batches if self.replay is None else self.replay.given(step, batches)

    def record(self, step: int, batches: Sequence[Batch], routes: Sequence[Mapping[int, Tensor]]) -> None:
        """Write the routes of a step, if they are recorded. Collective; raises OSError on rank 0."""
        if self.recorder is not None:
            self.recorder.record(step, batches, routes)
