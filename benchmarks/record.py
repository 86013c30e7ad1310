"""Writes the results of a benchmark to ``benchmarks/results``, with date, commit and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def write(name: str, measured: dict[str, Any]) -> Path:
    """Write ``results/NAME.json`` and return its path."""
    described = {"date": date.today().isoformat(), "commit": commit(), "machine": _machine(), **measured}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(described, indent=1) + "\n")
    return path


def commit() -> str:
    """Return the current commit, and whether files other than results differ from it; empty outside a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=HERE).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){RESULTS}")
    return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")


def _machine() -> dict[str, Any]:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in cpu.split()]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cores": os.cpu_count(), "cpu": [platform.machine(), *wide], "gpu": gpu, "torch": torch.__version__}
