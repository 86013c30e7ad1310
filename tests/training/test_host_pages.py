"""Memory pages that a rank has freed: kept for the next step, or returned on request."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moefw.training.host_pages import KEEP_PAGES

MEASURED = """
from pathlib import Path
from moefw.training.host_pages import return_free_pages

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024

before = resident_mib()
freed, held = zip(*((bytearray(2**20), bytearray(2**10)) for _ in range(64)))
freed = None
kept = resident_mib() - before
return_free_pages()
print(kept, resident_mib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_freed_pages_are_kept_for_the_next_step_and_returned_when_asked():
    command = [sys.executable, "-c", MEASURED]
    said = subprocess.run(command, env=os.environ | KEEP_PAGES, capture_output=True, text=True, check=True).stdout
    kept, left = map(int, said.split())
    assert kept >= 60, f"{kept} MiB are kept of 64 that were freed"
    assert left <= 8, f"{left} MiB are left of 64 that were freed"
