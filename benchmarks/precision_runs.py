"""Runs of ``precision_runs.yaml`` under each precision recipe: final validation loss against bf16, seed by seed.

    python benchmarks/precision_runs.py [--steps 600] [--seeds 0 1 2] [--recipes bf16 fp8-blockwise ...]

Runs of one seed have the same data, initial weights and schedule. Two of them repeat bf16 with another order of sums;
their differences show the effect of chance. Results are written and drawn after each run. Earlier runs in the file
with the same number of steps are kept, each with its commit, unless they are requested again. The bf16 run of a seed
is added if it is missing.
Exit code 1 if a requested recipe is, on average, worse than bf16 by more than its goal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

import record

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "benchmarks" / "precision_runs.yaml"
EMULATED = {"backend": "emulate"}
BF16 = "bf16"
RECIPES: Mapping[str, Mapping[str, Any]] = {
    BF16: {"use": "bf16"},
    "fp32": {"use": "fp32"},
    "fp8-blockwise": {"use": "fp8-blockwise", **EMULATED},
    "fp8-blockwise, activations saved in fp8": {"use": "fp8-blockwise", **EMULATED, "saved_activations": "fp8"},
    "mxfp8": {"use": "mxfp8", **EMULATED},
    "nvfp4": {"use": "nvfp4", **EMULATED},
    "nvfp4, rounded to nearest": {"use": "nvfp4", **EMULATED, "stochastic_rounding": False},
    "nvfp4, without Hadamard": {"use": "nvfp4", **EMULATED, "hadamard": False},
    "nvfp4, weights in 1x16": {"use": "nvfp4", **EMULATED, "square_weights": False},
    "nvfp4, in all layers": {"use": "nvfp4", **EMULATED, "keep_bf16": []},
    "fp8-tensor": {"use": "fp8-tensor", **EMULATED},
    "fp8-tensor, delayed": {"use": "fp8-tensor", **EMULATED, "scaling": "delayed"},
}
SAME: Mapping[str, Mapping[str, Any]] = {
    "bf16, on one rank": {"parallel": {}},
    "bf16, experts in a loop": {"gemm": {"use": "loop"}},
}
"""Replaced sections of a bf16 run that only change the order of sums."""
GOALS = {name: 0.015 if name.startswith("nvfp4") else 0.005 for name in RECIPES}
"""Share of the loss by which a recipe may be worse than bf16."""

Runs = dict[tuple[str, int], dict[str, Any]]


def main() -> int:
    """Train, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    names = [*RECIPES, *SAME]
    parser.add_argument("--recipes", nargs="+", choices=names, default=names)
    parser.add_argument("--goal", type=float, help="how much worse than bf16 a recipe may be, instead of its own goal")
    parser.add_argument("--no-write", action="store_true", help="print and judge, and leave the results as they are")
    options = parser.parse_args()
    runs = {} if options.no_write else earlier(options.steps)
    for seed in options.seeds:
        spared = [] if (BF16, seed) in runs else [BF16]
        for name in dict.fromkeys([*spared, *options.recipes]):
            runs[name, seed] = train(name, seed, options.steps)
            ratio = runs[name, seed]["eval_loss"] / runs[BF16, seed]["eval_loss"] - 1
            print(f"seed {seed}  {name:40} {runs[name, seed]['eval_loss']:.4f} nats a byte  {ratio:+.2%}", flush=True)
            summary = summarise(runs, options.goal)
            if not options.no_write:
                about = {"spec": str(SPEC.relative_to(ROOT)), "steps": options.steps, "summary": summary}
                path = record.write("precision_runs", {**about, "runs": list(runs.values())})
                draw(runs, path.with_suffix(".png"), options.steps)
    judged = [row for row in summary if row["recipe"] in options.recipes and row["goal"] is not None]
    return 0 if all(row["against_bf16"] <= row["goal"] for row in judged) else 1


def earlier(steps: int) -> Runs:
    """Return the runs of ``steps`` steps that the file holds."""
    path = record.RESULTS / "precision_runs.json"
    found = json.loads(path.read_text()) if path.exists() else {"steps": steps, "runs": []}
    kept = found["runs"] if found["steps"] == steps else []
    return {(run["recipe"], run["seed"]): run for run in kept}


def train(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train and return the validation loss at the end, in nats a byte, and the commit."""
    commit = record.commit()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [f"train.steps={steps}", "train.checkpoint_every=0", "train.eval_every=0", f"run.seed={seed}"]
        sections = {"precision": RECIPES.get(name, RECIPES[BF16]), **SAME.get(name, {})}
        settings += [f"run.dir={run}", *(f"{section}={json.dumps(tree)}" for section, tree in sections.items())]
        command = [sys.executable, "-m", "moefw", "train", str(SPEC), *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {"recipe": name, "seed": seed, "eval_loss": last["eval_loss"], "commit": commit}


def summarise(runs: Runs, goal: float | None) -> list[dict[str, Any]]:
    """Return for each recipe its mean loss, the spread over seeds, and the mean ratio to bf16 with the same seed.

    ``goal`` replaces the goals of all recipes.
    """
    rows = []
    for name in dict.fromkeys(name for name, _ in runs):
        seeds = [seed for other, seed in runs if other == name and (BF16, seed) in runs]
        losses = [runs[name, seed]["eval_loss"] for seed in seeds]
        ratios = [loss / runs[BF16, seed]["eval_loss"] - 1 for loss, seed in zip(losses, seeds, strict=True)]
        rows.append(
            {
                "recipe": name,
                "seeds": seeds,
                "eval_loss": mean(losses),
                "spread": max(losses) - min(losses),
                "against_bf16": mean(ratios),
                "goal": GOALS.get(name) if goal is None else goal,
            }
        )
    return rows


def draw(runs: Runs, path: Path, steps: int) -> None:
    """Draw a dot for each run, a row for each recipe: loss against bf16 with the same seed; bf16 against its mean."""
    names: Sequence[str] = list(dict.fromkeys(name for name, _ in runs))
    usual = mean(run["eval_loss"] for (name, _), run in runs.items() if name == BF16)
    figure = Figure(figsize=(8, 1.2 + 0.42 * len(names)), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.axvline(0.0, color="#8a919c", zorder=1)
    for row, name in enumerate(names):
        mine = {seed: run["eval_loss"] for (other, seed), run in runs.items() if other == name}
        against = {seed: usual if name == BF16 else runs[BF16, seed]["eval_loss"] for seed in mine}
        above = [100 * (mine[seed] / against[seed] - 1) for seed in mine]
        axes.plot(above, [row] * len(above), "o", color="#2a6fb0", alpha=0.75)
        axes.plot([mean(above)], [row], "|", color="#22272e", markersize=16)
    axes.set_yticks(range(len(names)), ["bf16, around its mean" if name == BF16 else name for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    loss = f"validation loss after {steps} steps, % above bf16 with the same seed"
    axes.set_xlabel(f"{loss}\na dot a seed, a bar their mean")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
