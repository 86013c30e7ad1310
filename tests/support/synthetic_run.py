"""A folder with the files of a run that was never trained, as docs/runs.md describes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

BEGAN_S = 1_795_000_000.0
SECTIONS = {"data": 0.004, "forward": 0.11, "backward": 0.19, "gradients": 0.03, "optimizer": 0.015, "other": 0.002}
NUM_WINDOWS = 128
FLOPS_PER_TOKEN = 18_874_368.0
RANKS = 4


def write_run(
    folder: Path,
    *,
    steps: int = 300,
    layers: int = 3,
    experts: int = 16,
    eval_every: int = 100,
    spike_at: int | None = None,
    resumed_at: int | None = None,
    ended: bool = True,
    seed: int = 0,
    spec: dict[str, Any] | None = None,
) -> Path:
    """Write the run and return its folder.

    The loss falls and is noisy, and is tenfold in the one step ``spike_at``; the load of experts evens out. A run that
    is ``resumed_at`` a step was killed 7 steps later. One that has not ``ended`` is still going.
    """
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    _write_metrics(folder, random, steps=steps, layers=layers, experts=experts, every=eval_every, spike_at=spike_at)
    _write_load(folder, random, steps=steps, layers=layers, experts=experts)
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in _events(steps, layers, experts, spike_at, resumed_at, ended))
    )
    resolved = {**_spec(steps, layers, experts), **(spec or {})}
    (folder / "spec.yaml").write_text(json.dumps(resolved, indent=1) + "\n# sha256 not checked by a report\n")
    (folder / "origins.json").write_text(
        json.dumps(
            {
                "model.dim": "preset qwen3-moe-tiny",
                "model.num_layers": "default",
                "model.num_experts": "examples/quickstart.yaml:4",
                "model.top_k": "preset qwen3-moe-tiny",
                "train.steps": "command line",
                "train.lr": "examples/quickstart.yaml:22",
                "train.seq_len": "default",
                "run.seed": "default",
            }
        )
    )
    (folder / "ledger.json").write_text(json.dumps({"predicted": _plan(), "measured": {"peak": 92_000_000}}))
    (folder / "sample.txt").write_text('def read(path):\n    """Text of a file."""\n    return path.read_text()\n')
    return folder


def _write_metrics(
    folder: Path,
    random: np.random.Generator,
    *,
    steps: int,
    layers: int,
    experts: int,
    every: int,
    spike_at: int | None,
) -> None:
    uneven_L = random.uniform(1.5, 3.0, layers)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            done = step / steps
            noise = random.normal()
            loss = 1.9 + 5.7 * math.exp(-6 * done) + 0.06 * noise
            if step == spike_at:
                loss *= 10
            seconds = {name: s * (1 + 0.05 * random.random()) for name, s in SECTIONS.items()}
            norms = {
                "routers": 0.05 * (1 + abs(noise)),
                "experts": 0.7 + 0.1 * noise**2,
                "attention": 0.4,
                "rest": 0.3 + 0.02 * random.random(),
            }
            fade = math.exp(-5 * done)
            busiest_L = 1.1 + uneven_L * fade + 0.05 * random.random(layers)
            idlest_L = np.maximum(0.9 - uneven_L * fade / 2, 0.0)
            record = {
                "step": step,
                "time": BEGAN_S + 0.36 * step,
                "loss": loss,
                "aux_loss": 0.015 + 0.01 * fade,
                "loss_shares": {"aux_loss": (0.015 + 0.01 * fade) / (loss + 0.025)},
                "dropped_choices": float(int(40 * fade * random.random())),
                "grad_norm": math.sqrt(sum(norm**2 for norm in norms.values())),
                "grad_norms": norms,
                "lr": 3e-3 * min(step / max(steps / 10, 1), 1.0),
                "tokens_per_s": 2048 / sum(seconds.values()),
                "model_tflops_per_gpu": 2048 * FLOPS_PER_TOKEN / RANKS / sum(seconds.values()) / 1e12,
                "load_max_over_mean": float(busiest_L.max()),
                "seconds": seconds,
                "experts": {
                    "busiest": _digits(busiest_L),
                    "idlest": _digits(idlest_L),
                    "dead": (idlest_L == 0).astype(int).tolist(),
                    "load_entropy": _digits(1.0 - 0.2 * fade * uneven_L / 3),
                    "router_entropy": _digits(0.95 - 0.3 * done + 0.01 * random.random(layers)),
                },
            }
            if step == spike_at:
                record["loss_spikes"] = 1
            if step % every == 0 or step == steps:
                record |= {"eval_loss": loss, "eval_bits_per_byte": loss / math.log(2) / 3.1}
            file.write(json.dumps(record) + "\n")


def _digits(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def _write_load(folder: Path, random: np.random.Generator, *, steps: int, layers: int, experts: int) -> None:
    """Loads that even out; expert 3 of the first layer is dead from the middle of the run on."""
    width = 1
    while steps / width > NUM_WINDOWS:
        width *= 2
    skew_LE = random.normal(size=(layers, experts))
    with (folder / "expert_load.jsonl").open("w") as file:
        for first in range(1, steps + 1, width):
            last = min(first + width - 1, steps)
            load_LE = np.exp(skew_LE * (0.1 + math.exp(-5 * first / steps)))
            if first > steps / 2:
                load_LE[0, 3] = 0.0
            load_LE /= load_LE.mean(axis=1, keepdims=True)
            load = np.round(load_LE, 4).tolist()
            window = {"first": first, "last": last, "layers": list(range(1, layers + 1)), "load": load}
            file.write(json.dumps(window) + "\n")


def _events(
    steps: int, layers: int, experts: int, spike_at: int | None, resumed_at: int | None, ended: bool
) -> list[dict[str, Any]]:
    start = {
        "versions": {"moefw": "0.1.0", "python": "3.11.2", "torch": "2.13.0"},
        "machine": {
            "host": "node-1",
            "device": "cpu",
            "name": "a processor",
            "computes_on": "a processor, 1 thread",
            "cores": 2,
        },
        "ranks": RANKS,
        "layout": {"pp": 2, "ep": 2},
        "parameters": 8_100_000,
        "moe_layers": list(range(1, layers + 1)),
        "experts": experts,
        "top_k": 4,
        "tokens_per_step": 2048,
    }
    half = max(steps // 2, 1)
    events: list[dict[str, Any]] = [
        {"event": "start", "step": 0, **start},
        {
            "event": "evaluation",
            "step": half,
            "loss": 2.2,
            "bits_per_byte": 1.9,
            "zlib_bits_per_byte": 1.77,
            "seconds": 1,
        },
        {"event": "checkpoint", "step": half, "path": f"checkpoints/step-{half}", "seconds": 0.4},
    ]
    if spike_at is not None:
        events.append({"event": "loss_spike", "step": spike_at, "reason": f"step {spike_at}: the loss is a spike"})
    if resumed_at is not None:
        whence = {"checkpoint": f"checkpoints/step-{resumed_at}", "lost_steps": 7, "changes": ["train.lr: 1 is 2 now"]}
        events.append({"event": "resume", "step": resumed_at, **start, "layout_before": {"ep": 2}, **whence})
    events.sort(key=lambda event: int(event["step"]))
    if ended:
        bits = {"loss": 1.9, "bits_per_byte": 1.6, "zlib_bits_per_byte": 1.77, "seconds": 1.1}
        memory = {"peak_bytes": 210_000_000, "of": "process"}
        events += [
            {"event": "evaluation", "step": steps, **bits},
            {"event": "checkpoint", "step": steps, "path": f"checkpoints/step-{steps}", "seconds": 0.4},
            {"event": "end", "step": steps, "outcome": "done", "reason": "", "memory": memory},
        ]
    return [{"time": BEGAN_S + 0.36 * event["step"], **event} for event in events]


def _spec(steps: int, layers: int, experts: int) -> dict[str, Any]:
    return {
        "model": {"dim": 256, "num_layers": layers, "num_experts": experts, "top_k": 4},
        "train": {"steps": steps, "lr": 3e-3, "seq_len": 128},
        "memory": [],
        "run": {"seed": 0},
    }


def _plan() -> dict[str, Any]:
    """The part of a ledger that a report reads."""
    return {
        "world": 2,
        "held": {
            "parameters": 16_050_176,
            "gradients": 16_050_176,
            "optimizer": 32_100_496,
            "buffers": 192,
            "batch": 16_448,
            "host": 0,
            "step_passing": 6_612_992,
        },
        "pools": 0,
        "totals": {"without_policies": 60_000_000, "saved": 24_000_000, "offloaded": 0, "stashed": 0},
        "regions": [
            {"kind": "moe", "region": "router", "layers": 3, "without_policies": 3_760_348, "saved": 3_760_348},
            {"kind": "moe", "region": "expert_fc1", "layers": 3, "without_policies": 50_333_032, "saved": 14_333_032},
        ],
        "peak_bytes": 88_217_312,
        "unknown": "",
        "modelled": [],
        "flops_per_token": FLOPS_PER_TOKEN,
    }
