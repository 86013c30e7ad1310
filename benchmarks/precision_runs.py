"""The quickstart under each precision recipe: final validation loss against that of bf16.

    python benchmarks/precision_runs.py [--steps 600] [--recipes bf16 fp8-blockwise ...]

Runs one after the other with the same data, seed and schedule. The goal is a loss within 0.5 % of bf16's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "examples" / "quickstart.yaml"
EMULATED = {"backend": "emulate"}
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"use": "bf16"},
    "fp32": {"use": "fp32"},
    "fp8-blockwise": {"use": "fp8-blockwise", **EMULATED},
    "fp8-blockwise, activations saved in fp8": {"use": "fp8-blockwise", **EMULATED, "saved_activations": "fp8"},
    "mxfp8": {"use": "mxfp8", **EMULATED},
}
GOAL = 0.005


def main() -> int:
    """Train, print and write what is known after each run; 1 if a loss is further from bf16's than the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = parser.parse_args()
    losses: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(["bf16", *options.recipes]):
        losses[name] = train(RECIPES[name], options.steps)
        rows.append({"recipe": name, "eval_loss": losses[name], "against_bf16": losses[name] / losses["bf16"] - 1})
        print(f"{name:40} {losses[name]:.4f} nats a byte {rows[-1]['against_bf16']:+.3%}", flush=True)
        about = {"spec": str(SPEC.relative_to(ROOT)), "steps": options.steps, "goal": GOAL}
        record.write("precision_runs", {**about, "runs": rows})
    return 0 if all(abs(row["against_bf16"]) <= GOAL for row in rows) else 1


def train(precision: dict[str, Any], steps: int) -> float:
    """Return the validation loss after a run, in nats a byte."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        overrides = [f"train.steps={steps}", "train.checkpoint_every=0", "train.eval_every=0", f"run.dir={run}"]
        command = [sys.executable, "-m", "moefw", "train", str(SPEC), *overrides, f"precision={json.dumps(precision)}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        return float(last["eval_loss"])


if __name__ == "__main__":
    sys.exit(main())
