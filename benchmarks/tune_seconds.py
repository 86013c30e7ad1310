"""Processor seconds of ``moefw tune`` around a published layout, without a cache and with what that search left there.

``python benchmarks/tune_seconds.py`` searches around DeepSeek-V3 on 1,024 H100, and prints candidates, excerpts (a
layer of each kind with settings of its own, measured once each), and processor seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Final

import record
from published_rows import read
from tune import searched

ROW: Final = "p109"


def main() -> None:
    """Search twice, print both searches and record them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--row", default=ROW, metavar="ID")
    arguments = parser.parse_args()
    row = next(row for row in read() if row["id"] == arguments.row)
    with tempfile.TemporaryDirectory() as folder:
        searches = {cache: searched(row, arguments.candidates, folder) for cache in ("cold", "warm")}
    print("| cache | candidates | fit | measured | from the cache | CPU s |\n|---|---|---|---|---|---|")
    for cache, found in searches.items():
        counts = found["counts"]
        names = ("candidates", "fit", "layer settings measured", "layer settings from the cache")
        print(f"| {cache} | {' | '.join(str(counts[name]) for name in names)} | {found['cpu_s']:.1f} |")
    told = {
        cache: {"counts": found["counts"], "best": found["best"]["settings"], "cpu_s": round(found["cpu_s"], 1)}
        for cache, found in searches.items()
    }
    record.write("tune_seconds", {"row": row["id"], **told})


if __name__ == "__main__":
    main()
