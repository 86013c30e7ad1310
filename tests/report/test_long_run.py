"""The page of a long run of a large model is small, and soon made in little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from synthetic_run import write_run


@pytest.mark.deep
def test_pages_of_20_000_steps_of_58_layers_and_256_experts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20_000, layers=58, experts=256, eval_every=1000, spike_at=10_312)
    for runs in ([run], [run, run]):
        process = subprocess.Popen(
            [sys.executable, "-m", "moefw", "report", *map(str, runs), "--out", str(tmp_path / "page")]
        )
        _, status, used = os.wait4(process.pid, 0)
        assert status == 0
        assert used.ru_utime + used.ru_stime < 60 * len(runs)
        assert used.ru_maxrss < 1_000_000  # in KiB
        assert (tmp_path / "page").stat().st_size <= 3_000_000
        print(
            f"{used.ru_utime + used.ru_stime:.1f} s of CPU, {used.ru_maxrss / 1e3:.0f} MB, {(tmp_path / 'page').stat().st_size:,} bytes"
        )
