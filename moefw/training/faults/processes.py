"""What keeps a process from running, as the kernel tells it to others on the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

STOPPED: Final = "its process is stopped"
GONE: Final = "its process is gone"
SILENT: Final = "its process does not answer"
_STATES: Final = {
    "T": STOPPED,
    "t": STOPPED,
    "D": "its process waits inside the kernel, for a disk or a file system",
    "Z": GONE,
    "X": GONE,
}


def process_state(pid: int) -> str:
    """Return what keeps a process of this machine from running; nothing where it may run."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return GONE
    return _STATES.get(after_name.split()[0], "")
