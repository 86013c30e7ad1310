"""The plan of a run's memory, which a process of low priority makes beside the run.

It waits for no step, and no step waits for it. It reads the spec and the number of ranks from a line of its standard
input, and ends when that input ends: with the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from moefw.commands.plan import PLANS
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import MoefwError, os_reason
from moefw.planner import ledger
from moefw.system.folders import cache_dir
from moefw.system.python import python
from moefw.training import ledger_file
from moefw.training.folder import kept_spec

NICENESS: Final = 10
"""Of the process: it gets a tenth of a core that a rank uses, too, and all of one that has nothing else to do."""
LOOK_S: Final = 0.1
PLANNED: Final = "planned"
"""The line that the process prints when the plan is written."""


@contextmanager
def planned_beside(assembly: Assembly) -> Iterator[None]:
    """Let the plan of a rank's memory and work be written into the run's ledger, while the code inside runs.

    The run reads its operations a token there. If it is not ready in the end, or fails, the ledger says so. A run never
    fails for it.
    """
    told = json.dumps([kept_spec(assembly), assembly.layout.world]).encode() + b"\n"
    if ledger_file.path_of(assembly).is_file():
        with suppress(MoefwError, OSError):
            ledger_file.write(assembly, predicted=None)  # of an earlier attempt, whose spec may have been another
    try:
        process = subprocess.Popen(
            python("-m", __name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        yield
        _unplanned(assembly, f"its process could not be started: {os_reason(error)}.")
        return
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(told)
        process.stdin.flush()
    try:
        yield
    finally:
        failed = bool(process.poll())
        process.kill()
        said, errors = process.communicate()
        if failed:
            _unplanned(assembly, (errors.decode(errors="replace").splitlines() or ["no reason is known."])[-1])
        elif PLANNED.encode() not in said.splitlines():
            _unplanned(assembly, "the run ended before it was ready. See `moefw plan`.")


def _unplanned(assembly: Assembly, reason: str) -> None:
    """Write why there is no plan into the ledger of a run that has begun, in the place of an earlier one."""
    if (Path(assembly.spec.run.dir) / "spec.yaml").is_file():
        with suppress(MoefwError, OSError):
            ledger_file.write(assembly, predicted=None, no_plan=reason)


def main() -> None:
    """Plan the spec that is read from standard input."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process
    tree, world = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        assembly = assemble_tree(tree, Marks("spec.yaml"), defaults=defaults(), world=world)
        predicted = ledger(assembly, cache=cache_dir() / PLANS).to_data()
        while not (Path(assembly.spec.run.dir) / "spec.yaml").is_file():
            time.sleep(LOOK_S)  # a run that does not begin leaves nothing in its folder
        ledger_file.write(assembly, predicted=predicted, no_plan=None)
        print(PLANNED, flush=True)
    except MoefwError as error:
        sys.exit(str(error))


def _end_with_input() -> None:
    # Not ``sys.stdin.buffer``: Python waits for the lock that its reader holds when the main thread has ended.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
