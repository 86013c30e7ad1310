"""Time and result of the quickstart, and the loads of its experts with and without balancing.

Runs ``examples/quickstart.yaml`` unchanged, then as ``make train`` runs it on a CPU without instructions for bf16, and
for a quarter of its steps with ``routing.balance=[]``. Writes ``benchmarks/results/quickstart.json``, and the plots of
the first run to ``docs/images``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

import record
from moefw.training.records.expert_load import EXPERT_LOAD, last_steps, read_expert_load
from moefw.training.records.metrics import read_metrics

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
WINDOW = 50
WITHOUT_BF16 = ("precision.use=fp32", "train.steps=700")


def main() -> None:
    """Run, print and write."""
    steps = YAML(typ="safe").load(SPEC)["train"]["steps"]
    with tempfile.TemporaryDirectory() as folder:
        measured = {
            "quickstart": train(Path(folder) / "quickstart"),
            "fp32": train(Path(folder) / "fp32", *WITHOUT_BF16),
            "without balance": train(Path(folder) / "without", f"train.steps={steps // 4}", "routing.balance=[]"),
        }
        for name, result in measured.items():
            print(name, result)
        print(record.write("quickstart", measured))
        for picture in (Path(folder) / "quickstart" / "plots").glob("*.png"):
            shutil.copy(picture, IMAGES / f"quickstart-{picture.name}")


def train(run: Path, *overrides: str) -> dict[str, Any]:
    """Train and return a summary of ``metrics.jsonl``; loads are averages over the last steps."""
    command = [sys.executable, "-m", "moefw", "train", str(SPEC), f"run.dir={run}", *overrides]
    subprocess.run(command, check=True)
    records = list(read_metrics(run / "metrics.jsonl"))
    tokens = YAML(typ="safe").load(run / "spec.yaml")["train"]["tokens_per_step"]
    mean = last_steps(read_expert_load(run / EXPERT_LOAD), WINDOW)
    assert mean is not None, "the quickstart has MoE layers"
    busiest_SL = np.array([one["experts"]["busiest"] for one in records[-WINDOW:]])
    return {
        "steps": len(records),
        "training_s": round(sum(tokens / one["tokens_per_s"] for one in records), 1),
        "tokens_per_s": round(float(np.median([one["tokens_per_s"] for one in records]))),
        "eval_bits_per_byte": round(records[-1]["eval_bits_per_byte"], 4),
        "busiest_expert_by_layer": mean.load_LE.max(1).round(3).tolist(),
        "idlest_expert_by_layer": mean.load_LE.min(1).round(3).tolist(),
        "busiest_expert_of_a_step_median": np.median(busiest_SL, axis=0).round(3).tolist(),
    }


if __name__ == "__main__":
    main()
