"""This process: its rank, and what Ctrl-C does to it.

Imports little: until :func:`end_at_once_on_interrupt` is called, Ctrl-C ends in a traceback.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that Ctrl-C has ended."""


def rank() -> str:
    """Rank that torchrun, or else Slurm, gave this process; "0" without both."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")


def local_rank() -> str:
    """Rank on this machine that torchrun, or else Slurm, gave this process; "0" without both."""
    return os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")


def end_at_once_on_interrupt() -> None:
    """Let Ctrl-C end this process at once. Do nothing if it is ignored, as in the ranks of a launcher.

    For the time before a command begins: there is nothing to undo, and a module that is being imported may swallow a
    KeyboardInterrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def end_at_once(*_: object) -> None:
    """End this process: the handler of Ctrl-C."""
    say_interrupted()
    os._exit(INTERRUPTED)


def say_interrupted() -> None:
    """Say on rank 0 that Ctrl-C has ended the process."""
    if rank() == "0":
        try:
            os.write(2, b"interrupted.\n")
        except OSError:
            return
