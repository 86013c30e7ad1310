"""Memory pages that a rank has freed: kept for the next step, or returned on request."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moefw.training.host_pages import KEEP_PAGES

RESIDENT = """
from pathlib import Path
from moefw.training.host_pages import return_free_pages

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024

"""
KEPT = (
    RESIDENT
    + """
before = resident_mib()
freed, held = zip(*((bytearray(2**20), bytearray(2**10)) for _ in range(64)))
freed = None
kept = resident_mib() - before
return_free_pages()
print(kept, resident_mib() - before)
"""
)
FREED_BY_ANOTHER_THREAD = (
    RESIDENT
    + """
from threading import Thread

def allocate():
    return [bytearray(2**20) for _ in range(64)]

before = resident_mib()
thread = Thread(target=allocate)
thread.start()
thread.join()
kept = resident_mib() - before
held = allocate()
print(kept, resident_mib() - before)
"""
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")


def said_by(program: str) -> list[int]:
    """Return the numbers that a Python program prints, with the settings of a rank on a CPU."""
    command = [sys.executable, "-c", program]
    environment = os.environ | KEEP_PAGES
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return [*map(int, said.split())]


def test_freed_pages_are_kept_for_the_next_step_and_returned_when_asked():
    kept, left = said_by(KEPT)
    assert kept >= 60, f"{kept} MiB are kept of 64 that were freed"
    assert left <= 8, f"{left} MiB are left of 64 that were freed"


def test_a_thread_finds_the_pages_that_another_has_freed():
    kept, taken = said_by(FREED_BY_ANOTHER_THREAD)
    assert kept >= 60, f"{kept} MiB are kept of 64 that a thread freed"
    assert taken <= 72, f"{taken} MiB are taken for 64 that another thread had freed"
