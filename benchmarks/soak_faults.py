"""Faults of the soak: the action on a run, the launcher's exit code, and its message."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import frozen

from training_process import TrainingProcess

DISK_BYTES = 1 << 20
"""Largest file on the full disk: metrics and output fit, a shard of a checkpoint does not."""


@frozen
class Kind:
    """A fault, the exit code of the affected run, and a text that its error output contains."""

    strike: Callable[[TrainingProcess], None]
    code: int
    told: str
    damages: bool = False


@frozen
class Planned:
    """A fault that occurs when a step is recorded."""

    kind: str
    step: int


def _fill_disk(run: TrainingProcess) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for pid in run.ranks().values():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (DISK_BYTES, hard))


def _terminate(run: TrainingProcess) -> None:
    os.kill(run.pid, signal.SIGTERM)


KINDS: Mapping[str, Kind] = {
    "rank 0 killed": Kind(lambda run: run.signal_rank(0, signal.SIGKILL), 1, "rank 0 was ended by SIGKILL"),
    "rank 1 killed": Kind(lambda run: run.signal_rank(1, signal.SIGKILL), 1, "rank 1 was ended by SIGKILL"),
    "all killed": Kind(lambda run: run.signal_all(signal.SIGKILL), -signal.SIGKILL, ""),
    "rank 1 stopped": Kind(lambda run: run.signal_rank(1, signal.SIGSTOP), 1, "its process is stopped"),
    "SIGTERM": Kind(_terminate, 75, "stopped by a signal"),
    "Ctrl-C": Kind(lambda run: run.signal_all(signal.SIGINT), 75, "stopped by a signal"),
    "disk full": Kind(_fill_disk, 1, "could not be saved"),
    "checkpoint damaged": Kind(_terminate, 75, "stopped by a signal", damages=True),
}
"""All faults. A checkpoint is damaged while the run is stopped, between SIGTERM and the next start."""


def draw(chance: random.Random, *, faults: int, steps: int, apart: int) -> list[Planned]:
    """Return ``faults`` faults, of every kind if there are enough, each at least ``apart`` steps after the previous."""
    names = list(KINDS)
    kinds = chance.sample(names, min(faults, len(names))) + chance.choices(names, k=max(0, faults - len(names)))
    chance.shuffle(kinds)
    room = steps // faults
    return [Planned(kind, number * room + chance.randrange(apart, room)) for number, kind in enumerate(kinds)]


def flip_a_bit(checkpoint: Path, chance: random.Random) -> Path:
    """Flip a bit of a file of a checkpoint, and return the file."""
    path = chance.choice(sorted(checkpoint.iterdir()))
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return path
