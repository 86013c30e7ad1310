"""Processor seconds of ``moefw plan``, the first time and from the cache, for DeepSeek-V3 on 1,024 ranks.

With latent attention and its layer for a second token; without stages, and with four stages on each of 8 ranks along
pp; with the time of a step on a cluster; and with an optimizer that has a rule for matrices. Processes are measured
whole, start of Python included, with the bytecode of moefw that an installation has. A machine that others use, too,
takes more.
"""

from __future__ import annotations

import compileall
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

import moefw
import moefw_kernels
import record

WORLD: Final = 1024
SPEC: Final[dict[str, Any]] = {
    "model": {"preset": "deepseek-v3", "mtp_layers": 1},
    "routing": {
        "balance": [
            {"kind": "expert_bias", "rate": 1e-3},
            {"kind": "aux_loss", "over": "sequence", "coeff": 1e-4},
        ]
    },
    "precision": {"use": "bf16"},
    "memory": [
        {
            "use": "recompute",
            "regions": [
                "attn_norm",
                "mla_up_proj",
                "mlp_norm",
                "dense_mlp",
                "shared_experts",
                "dispatch",
                "expert_fc1",
            ],
        }
    ],
    "parallel": {
        "dense": {"shard": "all"},
        "experts": {"ep": 64, "shard": "all"},
        "ranks_per_node": 8,
    },
    "train": {"micro_batch": 1, "seq_len": 4096, "tokens_per_step": 4096 * WORLD * 8},
    "run": {"device": "cpu"},
}
STAGES: Final[dict[str, Any]] = {
    "parallel": {**SPEC["parallel"], "pp": 8},
    "pipeline": {"use": "interleaved", "chunks": 4},
}
FROM_CACHE_S: Final = 1.0


@frozen
class Case:
    """A plan: what its spec has beside :data:`SPEC`, its options, and the seconds that its first answer may take."""

    name: str
    aim_s: float
    more: dict[str, Any]
    options: Sequence[str] = ()


CASES: Final = (
    Case("without stages", 4.0, {}),
    Case("without stages, time on gb200", 4.0, {}, ("--cluster", "gb200")),
    Case("pp 8, four stages a rank", 12.0, STAGES),
    Case("pp 8, four stages a rank, time on gb200", 12.0, STAGES, ("--cluster", "gb200")),
    Case("without stages, muon", 12.0, {"train": {**SPEC["train"], "optimizer": {"use": "muon"}}}),
)


def main() -> None:
    """Measure, print and record."""
    for package in (moefw, moefw_kernels):
        compileall.compile_dir(Path(package.__path__[0]), quiet=1)
    found: dict[str, dict[str, float]] = {}
    print(f"{'processor seconds of a plan':41} {'first':>6} {'aim':>4} {'cached':>7} {'aim':>4}")
    for case in CASES:
        first, cached = seconds_of(case)
        found[case.name] = {"first": first, "aim": case.aim_s, "cached": cached, "aim_cached": FROM_CACHE_S}
        print(f"{case.name:41} {first:6.2f} {case.aim_s:4.0f} {cached:7.2f} {FROM_CACHE_S:4.0f}", flush=True)
    print(record.write("plan", {"world": WORLD, "spec": SPEC, "stages": STAGES, "cpu_seconds": found}))


def seconds_of(case: Case) -> tuple[float, float]:
    """Return the seconds of processors of the first plan of a case, and of one from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text(json.dumps({**SPEC, **case.more}))
        environment = {**os.environ, "MOEFW_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        return plan_s(spec, case.options, environment), plan_s(spec, case.options, environment)


def plan_s(spec: Path, options: Sequence[str], environment: dict[str, str]) -> float:
    """Return the seconds of processors of one plan, in user and system mode."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "moefw", "plan", str(spec), "--world", str(WORLD), *options, "--json"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
