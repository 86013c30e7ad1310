"""Whether the routes of a run, the experts that its routers choose, can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from moefw.compose.spec.sections import Spec
from moefw.core.errors import Problem

ROUTES: Final = "routes"
"""The folder of recorded routes in that of a run."""


def route_problems(spec: Spec, moe_layers: Sequence[int]) -> Iterator[Problem]:
    """Yield why routes can be neither recorded nor replayed. No file is opened."""
    train = spec.train
    if not (train.record_routes or train.replay_routes):
        return
    option = "train.record_routes" if train.record_routes else "train.replay_routes"
    if not moe_layers:
        fix = "Leave out train.record_routes and train.replay_routes."
        yield Problem("no layer has experts, so there are no routes.", fix, option)
    own = Path(spec.run.dir) / ROUTES
    if train.record_routes and train.replay_routes and Path(train.replay_routes).resolve() == own.resolve():
        yield Problem(f"it would write over {own}, which is replayed.", "Use another run.dir.", option)
