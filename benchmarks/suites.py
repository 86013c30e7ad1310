"""Processor seconds of each contract suite, for a built-in plugin of its kind; at most 20, but for dispatchers.

Each suite runs in a pytest of its own with the quick profile. Counted is the time of all its processes, which other
work on the machine hardly changes: the start of pytest and of the ranks is in it. Results go to
``benchmarks/results/suites.json``, and as a table into ``docs/guides/suites.md``. Exits with 1 if one takes longer.

    python benchmarks/suites.py [KIND ...]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import record

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "guides" / "suites.md"
BEGIN: Final = "<!-- written by benchmarks/suites.py"
END: Final = "<!-- end of what benchmarks/suites.py writes -->"
LIMIT: Final = 20
"""Processor seconds that a suite may take."""
PLUGINS: Final[Mapping[str, tuple[str, str]]] = {
    "attention": ("gqa", "{}"),
    "context_parallel": ("allgather_kv", "{}"),
    "router": ("topk", "{}"),
    "dispatcher": ("alltoall", "{}"),
    "gemm": ("grouped", "{}"),
    "precision": ("bf16", "{}"),
    "memory_policy": ("recompute", "{}"),
    "adapter": ("lora", "{}"),
    "layout": ("folded", "{}"),
    "pipeline": ("1f1b", "{}"),
    "data_source": ("text", "{}"),
    "optimizer": ("adamw", "{}"),
    "schedule": ("wsd", "{}"),
}
"""For each kind, the plugin that is certified, and its options."""
SMOKE: Final = ("dispatcher",)
"""Kinds with checks for the smoke profile."""


def main(*kinds: str) -> dict[str, Any]:
    """Measure, print, write, and return what was measured. The page is written if all kinds are measured."""
    rows: list[dict[str, Any]] = []
    for kind in kinds or PLUGINS:
        for profile in ("smoke", "quick") if kind in SMOKE else ("quick",):
            row = measure(kind, profile)
            print(row, flush=True)
            rows.append(row)
    measured = {"limit": LIMIT, "suites": rows}
    record.write("suites", measured, dry=bool(kinds))
    if not kinds:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + table(rows, record.commit()) + rest.partition(END)[2])
    return measured


def measure(kind: str, profile: str) -> dict[str, Any]:
    """Processor seconds of the suite of a kind. Raises RuntimeError if the plugin fails it."""
    name, options = PLUGINS[kind]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cpu_seconds", "-p", "no:cacheprovider"]
    chosen = [f"--moefw-{kind.replace('_', '-')}", name, "--moefw-options", options, "--moefw-profile", profile]
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, *chosen],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    seconds = re.search(r"(\d+) s of processors", done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or seconds is None or passed is None:
        raise RuntimeError(f"pytest {' '.join(chosen)} fails:\n{done.stdout}{done.stderr}")
    return {"kind": kind, "plugin": name, "profile": profile, "checks": int(passed[1]), "seconds": int(seconds[1])}


def table(rows: Sequence[Mapping[str, Any]], commit: str) -> str:
    """Table of a page, between comments that name this script and the commit."""
    cells = [("kind", "plugin", "profile", "checks", "CPU seconds"), ("---",) * 5]
    cells += [
        (f"`{row['kind']}`", f"`{row['plugin']}`", row["profile"], str(row["checks"]), str(row["seconds"]))
        for row in rows
    ]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([f"{BEGIN}, commit {commit} -->", "", *lines, "", END])


def too_slow(measured: Mapping[str, Any]) -> list[str]:
    """Kinds whose suite takes longer than the limit, but for dispatchers."""
    return [
        row["kind"] for row in measured["suites"] if row["seconds"] > measured["limit"] and row["kind"] != "dispatcher"
    ]


if __name__ == "__main__":
    sys.exit(1 if too_slow(main(*sys.argv[1:])) else 0)
