"""The page of a long run of a large model is small, and soon made in little memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from synthetic_run import write_run

# What the kernel counts of a process that has ended may be the memory of this one, from which it was forked.
MOEFW = """
import atexit, runpy
atexit.register(lambda: print(open("/proc/self/status").read()))
runpy.run_module("moefw", run_name="__main__")
"""


@pytest.mark.deep
def test_pages_of_20_000_steps_of_58_layers_and_256_experts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20_000, layers=58, experts=256, eval_every=1000, spike_at=10_312)
    page = tmp_path / "page"
    for runs in ([run], [run, run]):
        with (tmp_path / "said").open("w+") as said:
            command = [sys.executable, "-c", MOEFW, "report", *map(str, runs), "--out", str(page)]
            process = subprocess.Popen(command, stdout=said)
            _, status, used = os.wait4(process.pid, 0)
            assert status == 0
            said.seek(0)
            (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", said.read())
        assert used.ru_utime + used.ru_stime < 60 * len(runs)
        assert int(peak_kib) < 1_000_000
        assert page.stat().st_size <= 3_000_000
        print(
            f"{used.ru_utime + used.ru_stime:.1f} s of CPU, {int(peak_kib) / 1e3:.0f} MB, {page.stat().st_size:,} bytes"
        )
