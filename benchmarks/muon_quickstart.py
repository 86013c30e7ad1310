"""The quickstart with ``muon`` beside AdamW at equal time: bits a byte of both.

Trains the spec (``examples/quickstart.yaml`` unless one is given) as it is, then a few steps with ``muon``, whose time
tells how many of them fit into the same time, and then so many. Options behind the spec are overrides of both runs.

Results go to ``benchmarks/results/muon_quickstart.json``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Final

from ruamel.yaml import YAML

import record
from moefw.training.records.metrics import read_metrics

QUICKSTART: Final = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
MUON: Final = "train.optimizer={use: muon, adamw_beta2: 0.99}"
TRIED: Final = 30
"""Steps that tell the time of one."""


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", nargs="?", type=Path, default=QUICKSTART)
    parser.add_argument("overrides", nargs="*", help="such as train.steps=100")
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        adamw = train(arguments.spec, runs / "adamw", *arguments.overrides)
        tried = min(TRIED, adamw["steps"])
        step_s = train(arguments.spec, runs / "tried", *arguments.overrides, MUON, f"train.steps={tried}")["step_s"]
        steps = max(1, round(adamw["training_s"] / step_s))
        muon = train(arguments.spec, runs / "muon", *arguments.overrides, MUON, f"train.steps={steps}")
    for name, row in (("adamw", adamw), ("muon", muon)):
        print(f"{name:6} {row['steps']:6} steps {row['training_s']:8.1f} s {row['bits_per_byte']:8.4f} bits a byte")
    measured = {"spec": arguments.spec.name, "overrides": arguments.overrides, "adamw": adamw, "muon": muon}
    print(record.write("muon_quickstart", measured, dry=arguments.dry))


def train(spec: Path, run: Path, *overrides: str) -> dict[str, Any]:
    """Train, and return steps, seconds, and bits a byte of the held-out text."""
    subprocess.run([sys.executable, "-m", "moefw", "train", str(spec), f"run.dir={run}", *overrides], check=True)
    records = list(read_metrics(run / "metrics.jsonl"))
    tokens = YAML(typ="safe").load(run / "spec.yaml")["train"]["tokens_per_step"]
    seconds = [tokens / one["tokens_per_s"] for one in records]
    return {
        "steps": len(records),
        "training_s": round(sum(seconds), 1),
        "step_s": median(seconds),
        "bits_per_byte": round(records[-1]["eval_bits_per_byte"], 4),
    }


if __name__ == "__main__":
    main()
