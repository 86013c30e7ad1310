"""Writes the results of a benchmark with date, commit and machine.

They go to ``benchmarks/results``, or to the folder that the environment variable ``MOEFW_RESULTS`` names. Those of a
dry run go only there, or to a temporary folder: they are no results.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"
GATHERED = HERE.parent / ".offline" / "commit"
"""The commit from which ``gather_wheels.py`` ran: the best that is known where git is absent."""


def write(name: str, measured: dict[str, Any], *, dry: bool = False) -> Path:
    """Write ``NAME.json`` and return its path."""
    described = {"date": date.today().isoformat(), "commit": commit(), "machine": machine(), **measured}
    folder = Path(os.environ.get("MOEFW_RESULTS") or (tempfile.mkdtemp() if dry else RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(described, indent=1) + "\n")
    return path


def commit() -> str:
    """Return the commit, and whether files other than results differ from it; "unknown" without a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=HERE).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){RESULTS}")
    except FileNotFoundError:
        head = changed = ""
    if head:
        return head + (" with changes" if changed else "")
    return f"{GATHERED.read_text().strip()} when gathered" if GATHERED.exists() else "unknown"


def machine() -> dict[str, Any]:
    """Return the cores and wide instructions of the CPU, the GPU if there is one, and versions."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in cpu.split()]
    found = {"cores": os.cpu_count(), "cpu": [platform.machine(), *wide], "gpu": None, "torch": torch.__version__}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "gpu_bytes": gpu.total_memory}
        found |= {"cuda": torch.version.cuda, "triton": _version("triton")}
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
