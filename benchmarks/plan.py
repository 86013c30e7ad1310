"""Processor seconds of ``moefw plan``, the first time and from the cache, for 61 layers of 256 experts on 1,024 ranks.

Processes are measured whole, start of Python included. The aims are 4 s and 1 s.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import record

WORLD = 1024
SPEC = {
    "model": {
        "dim": 7168,
        "num_layers": 61,
        "num_dense_layers": 3,
        "dense_dim": 18432,
        "num_experts": 256,
        "top_k": 8,
        "expert_dim": 2048,
        "shared_expert_dim": 2048,
        "vocab_size": 129280,
    },
    "attention": {"num_heads": 128, "num_kv_heads": 128, "head_dim": 128},
    "routing": {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias"}]},
    "precision": {"use": "bf16"},
    "dispatch": {"use": "deepep", "backend": "torch"},
    "parallel": {"dense": {"shard": 64}, "experts": {"ep": 64, "shard": "all"}, "ranks_per_node": 8},
    "train": {"micro_batch": 1, "seq_len": 4096, "tokens_per_step": 4096 * WORLD * 2},
    "run": {"device": "cpu"},
}
AIMS_S = {"first": 4.0, "cached": 1.0}


def main() -> None:
    """Measure, print and record."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text(json.dumps(SPEC))
        environment = {**os.environ, "MOEFW_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        found = {name: cpu_seconds(spec, environment) for name in AIMS_S}
    for name, seconds in found.items():
        print(f"{name:7} {seconds:5.2f} s of a processor (aim {AIMS_S[name]:.0f} s)")
    print(record.write("plan", {"world": WORLD, "spec": SPEC, "cpu_seconds": found, "aims": AIMS_S}))


def cpu_seconds(spec: Path, environment: dict[str, str]) -> float:
    """Return the seconds of processors of one plan, in user and system mode."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "moefw", "plan", str(spec), "--world", str(WORLD), "--json"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
