"""Contents of a run's folder, to compare runs bit by bit: recorded steps and tensors of checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from moefw.training.folder import checkpoint_dirs
from moefw.training.metrics import read_metrics

TIMED = ("tokens_per_s",)
"""Metrics that differ between two runs of the same steps."""
_LAST_BYTES = 1 << 14


def last_step(metrics: Path) -> int:
    """Return the last step with a complete line in a ``metrics.jsonl``; 0 if there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def history(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return a run's metrics of each step, without times. Raises AssertionError if steps repeat or do not ascend."""
    records = read_metrics(run_dir / "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps)), f"{run_dir}: the steps are {steps}"
    return {record["step"]: {key: record[key] for key in record if key not in TIMED} for record in records}


def newest(run_dir: Path) -> int:
    """Return the step of the newest committed checkpoint of a run; 0 if there is none."""
    return max((step for step, _ in checkpoint_dirs(run_dir)), default=0)


def checkpoints(run_dir: Path) -> dict[int, dict[str, bytes]]:
    """Return the tensors of each committed checkpoint by step."""
    return {step: tensors(folder) for step, folder in checkpoint_dirs(run_dir)}


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """Return every tensor of a checkpoint by name: dtype, shape and bits."""
    found: dict[str, bytes] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        data = shard.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                kind = f"{entry['dtype']} {entry['shape']} "
                found[name] = kind.encode() + data[begin:][first:last]
    return found
