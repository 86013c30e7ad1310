"""A command that measures on ranks without training: it starts them here, or joins a world that was started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from moefw.commands.doctor.machine import usable_cores
from moefw.compose.spec.sections import RunSpec
from moefw.system.python import python
from moefw.training.faults.rank import watched
from moefw.training.faults.requests import StopRequests
from moefw.training.launcher import LAUNCHED, check_room, die_with_launcher, run_local_ranks
from moefw.training.world import ALONE, Place


def on_ranks(work: Callable[[Place], None], *, world: int, place: Place | None, run: RunSpec, needs: str) -> int:
    """Exit code of this process, which does ``work`` as one of ``world`` ranks, or starts the ranks that do.

    ``place``: that of torchrun or Slurm, None outside of both. Then several ranks are this command again, started
    here, and one rank is this process. ``needs``: the memory that a rank needs, for one that runs out of it.
    """

    def memory_note() -> str:
        return f"No model is built. {needs}"

    requests = StopRequests(
        resumable=lambda: False, launched=LAUNCHED in os.environ, torchrun="TORCHELASTIC_RUN_ID" in os.environ
    )
    with requests:
        if place is None and world > 1:
            check_room(world, cores=usable_cores())
            command = python("-m", "moefw", *sys.argv[1:])
            return run_local_ranks(command, world, run, requests, memory_note=memory_note)
        die_with_launcher()
        with watched(run, place or ALONE, requests, memory_note=memory_note):
            work(place or ALONE)
    return 0
