"""What is told of a rank's process that died: the signal, and the Python code that its threads were in."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from typing import Final

FRAMES: Final = 12
"""Frames told of each thread, innermost first: a plugin's kernel is close to them, and the pool's own code is not."""
_FRAME: Final = re.compile(r'  File ".*", line \d+ in ')


def write_stacks_to(pipe: int) -> None:
    """From now on in this process, write the Python stacks of all threads to a pipe when a signal such as SIGSEGV kills
    it. The file descriptor must stay open.
    """
    faulthandler.enable(pipe)


def death_text(exit_code: int, stacks: int) -> str:
    """Text about a process that is dead: how it ended, then what is in the pipe with this file descriptor."""
    if exit_code >= 0:
        return f"the process died with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return "\n".join([f"the process died of {name}", *_innermost(_written_to(stacks))])


def _written_to(pipe: int) -> str:
    """Text that is in a pipe. A child of the dead process, which may hold the other end, is not waited for."""
    os.set_blocking(pipe, False)
    written = b""
    try:
        while part := os.read(pipe, 1 << 16):
            written += part
    except BlockingIOError:
        pass  # it is empty, and its other end is open
    return written.decode(errors="replace")


def _innermost(stacks: str) -> list[str]:
    """Lines of what ``faulthandler`` writes, with the ``FRAMES`` innermost frames of each thread."""
    kept = []
    num_frames = 0
    for line in stacks.splitlines():
        is_frame = _FRAME.match(line)
        num_frames = num_frames + 1 if is_frame else 0
        names_libraries = line.startswith("Extension modules:")
        if line and num_frames <= FRAMES and not names_libraries:
            kept.append(line)
    return kept
