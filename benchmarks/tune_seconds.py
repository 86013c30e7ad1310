"""Processor seconds of ``moefw tune`` around a published layout, without a cache and with what that search left there.

``python benchmarks/tune_seconds.py`` searches around DeepSeek-V3 on 1,024 H100, and prints candidates, excerpts (a
layer of each kind with settings of its own, measured once each), and processor seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import record
from moefw.compose.spec.structure import plain
from published_rows import Row, read
from tune import spec_of

ROW: Final = "p109"


def main() -> None:
    """Search twice, print both searches and record them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--row", default=ROW, metavar="ID")
    arguments = parser.parse_args()
    row = next(row for row in read() if row["id"] == arguments.row)
    with tempfile.TemporaryDirectory() as folder:
        searches = {cache: searched(row, arguments.candidates, Path(folder)) for cache in ("cold", "warm")}
    print("| cache | candidates | fit | measured | from the cache | CPU s |\n|---|---|---|---|---|---|")
    for cache, found in searches.items():
        counts = found["counts"]
        names = ("candidates", "fit", "layer settings measured", "layer settings from the cache")
        print(f"| {cache} | {' | '.join(str(counts[name]) for name in names)} | {found['cpu_s']:.1f} |")
    record.write("tune_seconds", {"row": row["id"], **searches})


def searched(row: Row, candidates: int, folder: Path) -> dict[str, Any]:
    """Counts of a search around a row with the cache of a folder, what it recommends, and its processor seconds."""
    spec, software = folder / "spec.yaml", folder / "software.yaml"
    spec.write_text(json.dumps(spec_of(row)), encoding="utf-8")
    software.write_text(json.dumps(plain(row.software)), encoding="utf-8")
    system = row["system"].lower().removeprefix("dgx-")
    command = [sys.executable, "-m", "moefw", "tune", str(spec), "--cluster", system, "--gpus", row["gpus"]]
    command += ["--candidates", str(candidates), "--as", str(software), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "MOEFW_CACHE": str(folder / "cache")}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not told.stdout:
        raise RuntimeError(f"the search ended without an answer: {told.stderr}")
    found = json.loads(told.stdout)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"counts": found["counts"], "best": found["best"]["settings"], "cpu_s": round(seconds, 1)}


if __name__ == "__main__":
    main()
