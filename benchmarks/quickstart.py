"""Time and result of a quickstart, and the loads of its experts with and without balancing.

Runs ``examples/quickstart.yaml``, or the spec that is given, as it is, and for a quarter of its steps with
``routing.balance=[]``. Writes ``benchmarks/results/NAME.json``, with the spec's name. ``make train`` trains
``quickstart-fp32.yaml`` on a CPU without instructions for bf16. The pictures of the documentation are those of a
report: ``scripts/report_pages.py --images``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

import record
from moefw.training.records.expert_load import EXPERT_LOAD, last_steps, read_expert_load
from moefw.training.records.metrics import read_metrics

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
WINDOW = 50


def main() -> None:
    """Run, print and write."""
    spec = Path(sys.argv[1]) if len(sys.argv) > 1 else QUICKSTART
    steps = YAML(typ="safe").load(spec)["train"]["steps"]
    with tempfile.TemporaryDirectory() as folder:
        measured = {
            "quickstart": train(spec, Path(folder) / "quickstart"),
            "without balance": train(spec, Path(folder) / "without", f"train.steps={steps // 4}", "routing.balance=[]"),
        }
        for name, result in measured.items():
            print(name, result)
        print(record.write(spec.stem, measured))


def train(spec: Path, run: Path, *overrides: str) -> dict[str, Any]:
    """Train and return a summary of ``metrics.jsonl``; loads are averages over the last steps."""
    command = [sys.executable, "-m", "moefw", "train", str(spec), f"run.dir={run}", *overrides]
    start_s = time.perf_counter()
    subprocess.run(command, check=True)
    whole_s = time.perf_counter() - start_s
    records = list(read_metrics(run / "metrics.jsonl"))
    tokens = YAML(typ="safe").load(run / "spec.yaml")["train"]["tokens_per_step"]
    mean = last_steps(read_expert_load(run / EXPERT_LOAD), WINDOW)
    assert mean is not None, "the quickstart has MoE layers"
    busiest_SL = np.array([one["experts"]["busiest"] for one in records[-WINDOW:]])
    return {
        "steps": len(records),
        "whole_s": round(whole_s, 1),
        "training_s": round(sum(tokens / one["tokens_per_s"] for one in records), 1),
        "tokens_per_s": round(float(np.median([one["tokens_per_s"] for one in records]))),
        "eval_bits_per_byte": round(records[-1]["eval_bits_per_byte"], 4),
        "busiest_expert_by_layer": mean.load_LE.max(1).round(3).tolist(),
        "idlest_expert_by_layer": mean.load_LE.min(1).round(3).tolist(),
        "busiest_expert_of_a_step_median": np.median(busiest_SL, axis=0).round(3).tolist(),
    }


if __name__ == "__main__":
    main()
