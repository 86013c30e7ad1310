"""Checks of the doctor that need no library: Python, cores and memory, the disk, the working directory."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

from moefw.commands.doctor.capability import Capability

LOW_DISK_BYTES = 2**30


def inspect_machine() -> list[Capability]:
    """Capabilities of the machine and of this Python."""
    return [_python(), _cores_and_memory(), _disk(), _working_directory()]


def _python() -> Capability:
    here = platform.python_version()
    try:
        versions = metadata("moefw")["Requires-Python"]
    except PackageNotFoundError:
        why = "moefw is not installed here, so none of its plugins is found"
        return Capability("python", "unusable", here, why, "pip install moefw")
    if not SpecifierSet(versions).contains(here, prereleases=True):
        return Capability("python", "unusable", here, f"moefw wants {versions}", "Install another Python.")
    return Capability("python", "available", here, sys.executable)


def _cores_and_memory() -> Capability:
    return Capability(
        "cores and memory", "available", detail=f"{usable_cores()} cores, {_gib(usable_bytes())} of memory"
    )


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_bytes() -> int:
    """Memory of the machine, or of the container if that is less."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(limit).read_text().strip() if Path(limit).is_file() else ""
        num_bytes = min(num_bytes, int(text)) if text.isdigit() else num_bytes
    return num_bytes


def _disk() -> Capability:
    free = shutil.disk_usage(".").free
    if free < LOW_DISK_BYTES:
        return Capability("disk", "unusable", "", f"only {_gib(free)} are free here", "Point run.dir to another disk.")
    return Capability("disk", "available", detail=f"{_gib(free)} free here")


def _working_directory() -> Capability:
    name = "working directory"
    here = os.getcwd()
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(b"moefw")
    except OSError as error:
        return Capability(name, "unusable", "", f"{here}: {error.strerror}", "Point run.dir to a writable folder.")
    return Capability(name, "available", detail=f"{here} is writable")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
