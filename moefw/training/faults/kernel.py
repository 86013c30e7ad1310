"""Information from the kernel: why a process does not run, and whether memory ran out."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    """Why a process of this machine does not run; empty if it may run."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return GONE
    return _STATES.get(after_name.split()[0], "")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that Python or PyTorch's allocator of the host or a GPU had no memory left."""
    torchs = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError) or torchs


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for memory, on this machine or in this process's cgroup."""
    of_machine = _count(root / "proc/vmstat")
    return of_machine + sum(_count(folder / "memory.events") for folder in _cgroups(root))


def _count(path: Path) -> int:
    try:
        counter = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(counter[1]) if counter else 0


def _cgroups(root: Path) -> Sequence[Path]:
    try:
        own = re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
    except OSError:
        return []
    return [root / "sys/fs/cgroup" / own[1]] if own else []
