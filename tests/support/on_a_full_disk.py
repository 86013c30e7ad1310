"""Script for a separate mount namespace: trains on a small disk that is filled beforehand, once for each case."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from bare_runs import make_runs_bare
from moefw.cli import main

PAGE = 4096


def train(spec: str, disk: Path, free_pages: int, overrides: list[str]) -> dict[str, object]:
    """Train with ``free_pages`` pages left, and return the exit code, the output and the files."""
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    run = disk / "run"
    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * PAGE - free_pages * PAGE))
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main(["train", spec, f"run.dir={run}", *overrides])
    except SystemExit as ended:
        code = ended.code
    left = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()) if run.exists() else []
    lines = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").is_file() else ""
    events = (run / "events.jsonl").read_text() if (run / "events.jsonl").is_file() else ""
    subprocess.run(["umount", str(disk)], check=True)
    return {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "files": left,
        "metrics": lines,
        "events": events,
    }


if __name__ == "__main__":
    make_runs_bare()
    spec, disk, cases = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    print(json.dumps([train(spec, disk, free, overrides) for free, overrides in cases]))
