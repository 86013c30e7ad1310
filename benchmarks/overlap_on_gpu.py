"""Merged passes on GPUs: the same losses as passes in order, and how much of the communication they hide.

Two ranks train the quickstart for a few steps, in order and merged, and are traced. On one GPU they share it over gloo:
only losses and norms count then, which must have the same bits. With a GPU for each rank the shares are those of the
devices' own events, beside those of the virtual clock (``overlap.py``). Exits with 1 if a loss or a norm differs.

    python benchmarks/overlap_on_gpu.py [--dry]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

import goal
import record
from moefw.tracing.rank_file import read_ranks
from moefw.tracing.spans import HOST

ROOT: Final = Path(__file__).parents[1]
RANKS: Final = 2
STEPS: Final = 8
STEPS_OF_A_DRY_RUN: Final = 3
NUM_TRACED: Final = 2
"""Number of steps at the end of a run that are traced."""
MICRO_BATCHES: Final = 8
MICRO_BATCHES_OF_A_DRY_RUN: Final = 3
"""Enough for both directions of a merged pass, with a pass in order before and behind it."""
ORDERS: Final[Mapping[str, str]] = {"in order": "{use: 1f1b}", "merged": "{use: merged}"}
GOAL_HIDDEN: Final = 0.85
SMALL: Final = (
    *("data.path=CONTRIBUTING.md", "data.tokenizer=bytes", "model.num_layers=2", "model.num_experts=4"),
    *(
        "train.seq_len=32",
        "train.eval_tokens=64",
        "train.schedule={use: cosine}",
        "train.eval_every=0",
        "run.device=cpu",
        "precision={use: fp32}",
    ),
)


def main(*, dry: bool) -> bool:
    """Train, compare, print and write ``overlap_on_gpu.json``. Return whether all steps have the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {order: trained(Path(folder) / order.replace(" ", "-"), order, dry=dry) for order in ORDERS}
    same = runs["in order"]["steps"] == runs["merged"]["steps"]
    has_gpus = torch.cuda.device_count() >= RANKS
    hidden = runs["merged"]["hidden"] if has_gpus else None
    virtual = json.loads((record.RESULTS / "overlap.json").read_text())["deepseek_v3"]
    goals = [
        goal.at_least("merged passes: steps with the bits of passes in order", float(same), 1.0),
        goal.at_least("merged passes: communication that compute hides", hidden, GOAL_HIDDEN),
    ]
    print(goal.table(goals))
    print({order: {name: run[name] for name in ("hidden", "host_waits_a_layer")} for order, run in runs.items()})
    on_virtual_clock = {f"{row['dispatcher']}, {row['order']}": row["hidden"] for row in virtual}
    measured = {"gpus": torch.cuda.device_count(), "runs": runs, "on_virtual_clock": on_virtual_clock, "goals": goals}
    print(record.write("overlap_on_gpu", measured, dry=dry))
    return same


def trained(folder: Path, order: str, *, dry: bool) -> dict[str, Any]:
    """Loss and norm of each step of a run, the share of communication that is hidden, and waits of the host."""
    seq_len = 32 if dry else 1024
    steps = STEPS_OF_A_DRY_RUN if dry else STEPS
    micro_batches = MICRO_BATCHES_OF_A_DRY_RUN if dry else MICRO_BATCHES
    overrides = [
        f"pipeline={ORDERS[order]}",
        f"train.steps={steps}",
        f"run.dir={folder / 'run'}",
        "train.micro_batch=1",
        f"train.seq_len={seq_len}",
        f"train.tokens_per_step={RANKS * micro_batches * seq_len}",
        *(SMALL if dry else ("run.device=cuda",)),
    ]
    trace = folder / "trace.json"
    options = ["--trace", str(trace), "--trace-steps", f"{steps - NUM_TRACED + 1}:{steps}"]
    command = [sys.executable, "-m", "moefw", "train", "examples/quickstart.yaml", *overrides, *options]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {
        "steps": [[line["loss"], line["grad_norm"]] for line in lines],
        "hidden": json.loads(trace.with_suffix(".shares.json").read_text())["mean"]["hidden_communication"],
        "host_waits_a_layer": host_waits(trace.with_suffix(".spans")),
    }


def host_waits(folder: Path) -> float:
    """How often the host waits for its device in a layer of a micro-batch, in the mean of all ranks."""
    counts: Counter[str] = Counter()
    for rank in read_ranks(folder):
        for span in rank.spans:
            if span.kind == "wait" and span.name == HOST and span.passing is not None:
                counts["waits"] += 1
            elif span.kind == "phase" and span.name == "attend" and span.passing == "F":
                counts["layers"] += 1
    return counts["waits"] / max(1, counts["layers"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    sys.exit(0 if main(dry=parser.parse_args().dry) else 1)
