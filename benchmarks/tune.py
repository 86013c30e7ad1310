"""``moefw tune`` beside published layouts: whether the search finds them, and what it takes.

``python benchmarks/tune.py`` searches around the best published rows of three models, with the software of the row, and
prints the row's layout beside the best that was found, and processor seconds without and with a cache. Megatron's
distributed optimizer is ``zero: 1`` over all copies; its recompute of modules is ``recompute`` of the same regions;
formats are emulated and libraries of dispatchers stood in for, which changes neither products nor what is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import record
from closed_form import node_of, stages_of
from moefw.compose.spec.structure import plain
from published_rows import PRESETS, RECOMPUTED, Row, read

ROWS: Final = ("p018", "p019", "p015", "p109", "p142")
"""Best rows of DeepSeek-V3 on 256 GB300, at two batches, and on 1,024 H100, of Qwen3-235B, and of Kimi-K2."""
PRECISION: Final = {
    "bf16": {"use": "bf16"},
    "mxfp8": {"use": "mxfp8", "backend": "emulate"},
    "fp8block": {"use": "fp8-blockwise", "backend": "emulate"},
}
LIBRARIES: Final = ("deepep", "hybridep")
LETTERS: Final = {"embedding": "E", "dense": "t", "moe": "t", "mtp": "m", "head": "L"}
"""What stages hold, in the letters of a spec."""


def main() -> None:
    """Search around each row, twice: without a cache, and with what the first search has left there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--rows", nargs="*", default=ROWS)
    arguments = parser.parse_args()
    rows = {row["id"]: row for row in read()}
    results = {name: searched(rows[name], arguments.candidates) for name in arguments.rows}
    head = (
        "row",
        "published TFLOPS",
        "its layout",
        "predicted s",
        "best found s",
        "below the best, %",
        "fits",
        "CPU s",
    )
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for name, found in results.items():
        if not found["ok"]:
            print(f"{name}: {found['problems'][0]['what']} {found['problems'][0]['fix']}")
            continue
        own, best = found["own"], found["best"]
        below = 100 * (1 - best["step_time_s"] / own["step_time_s"])
        cells = [name, found["published_tflops"], found["layout"], f"{own['step_time_s']:.4g}"]
        cells += [f"{best['step_time_s']:.4g}", f"{below:.1f}", own["fits"], "{:.0f}, {:.0f}".format(*found["cpu_s"])]
        print(f"| {' | '.join(map(str, cells))} |")
    record.write("tune", {"candidates": arguments.candidates, "rows": results})


def searched(row: Row, candidates: int) -> dict[str, Any]:
    """What two searches around a row say, the second one, and the processor seconds of both."""
    with tempfile.TemporaryDirectory() as folder:
        spec, software = Path(folder) / "spec.yaml", Path(folder) / "software.yaml"
        spec.write_text(json.dumps(spec_of(row)), encoding="utf-8")
        software.write_text(json.dumps(plain(row.software)), encoding="utf-8")
        system = row["system"].lower().removeprefix("dgx-")
        command = [sys.executable, "-m", "moefw", "tune", str(spec), "--cluster", system, "--gpus", row["gpus"]]
        command += ["--candidates", str(candidates), "--as", str(software), "--json"]
        environment = {**os.environ, "MOEFW_CACHE": str(Path(folder) / "cache")}
        seconds = []
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    found: dict[str, Any] = json.loads(told.stdout)
    layout = " ".join(f"{axis}{row.number(axis)}" for axis in ("tp", "pp", "vpp", "ep"))
    return {**found, "layout": layout, "published_tflops": float(row["truth_tflops"]), "cpu_s": seconds}


def spec_of(row: Row) -> dict[str, Any]:
    """Spec of a row's layout."""
    layout = row.layout
    regions = [region for part in row["recompute"].split("+") for region in RECOMPUTED.get(part, ())]
    sharded = {"shard": "all", "zero": 3 if row["fsdp"] == "yes" else 1}
    merged = bool(row.software.ep_overlap)
    pipeline: dict[str, Any] = {"use": "1f1b"}
    if layout.pp > 1 and layout.chunks > 1:
        pipeline = {"use": "interleaved", "chunks": layout.chunks, "merged": merged}
    if layout.pp > 1:
        stages = ("".join(LETTERS[unit] for unit in stage) for stage in stages_of(row.sizes, layout))
        pipeline["layout"] = "|".join(stages)
    dispatcher = row["dispatcher"] or "alltoall"
    return {
        "model": {"preset": PRESETS[row["model"]], **({"mtp_layers": row.sizes.mtp} if row.sizes.mtp else {})},
        "precision": PRECISION[row["precision"]],
        "train": {
            "seq_len": row.number("seq_len"),
            "tokens_per_step": row.tokens,
            "micro_batch": row.number("micro_batch"),
        },
        "parallel": {
            "pp": layout.pp,
            "dense": {"tp": layout.tp, "cp": layout.cp, **sharded},
            "experts": {"ep": layout.ep, "etp": layout.expert_tp, **sharded},
            "ranks_per_node": min(layout.gpus, node_of(row.cluster)),
        },
        "pipeline": pipeline,
        "memory": [{"use": "recompute", "regions": regions}] if regions else [],
        "dispatch": {"use": dispatcher, **({"backend": "torch"} if dispatcher in LIBRARIES else {})},
    }


if __name__ == "__main__":
    main()
