"""Exit of a rank: at the end of its run, with its own message, or silently if others report why."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moefw.compose.spec.sections import RunSpec
from moefw.core.errors import RunError
from moefw.system.stamps import stamping
from moefw.training.errors import LostContactError
from moefw.training.faults.departures import left_early, out_of_memory
from moefw.training.faults.kernel import is_out_of_memory
from moefw.training.faults.requests import StopRequests
from moefw.training.faults.watch import Watch
from moefw.training.faults.way_on import with_way_on
from moefw.training.world import Place

CONTACT_S: Final = 8.0
"""Seconds that a rank is silent after it lost another one, which may still report why it left."""


@contextmanager
def watched(run: RunSpec, place: Place, requests: StopRequests, *, memory_note: Callable[[], str]) -> Iterator[None]:
    """Watch the code inside on this rank, from its first stamp on.

    ``memory_note`` returns the planned and the available memory. Raises RunError if the process is about to leave
    before its run is done, or ran out of memory. Exits silently if moefw's launcher will report that.
    """
    with Watch(run, place, requests) as watch, stamping(watch.stamps):
        try:
            yield
        except SystemExit as left:
            watch.end("told")
            problem = left_early(place.rank, watch.seen, left.code)
            raise RunError(with_way_on(problem, Path(run.dir))) from left
        except LostContactError as lost:
            watch.end("lost")
            if watch.launched:
                raise SystemExit(1) from lost
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(CONTACT_S)
            raise
        except BaseException as error:
            if not is_out_of_memory(error):
                watch.end("told")
                raise
            watch.end("memory")
            if watch.launched:
                raise SystemExit(1) from error
            problem = out_of_memory(place.rank, watch.seen, memory_note)
            raise RunError(with_way_on(problem, Path(run.dir))) from error
        watch.end("done")
