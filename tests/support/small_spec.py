"""The spec of a run that trains within a second: one layer of four experts, on a short text."""

from __future__ import annotations

import json
from pathlib import Path

MODEL = {"dim": 16, "num_layers": 1, "num_experts": 4, "top_k": 2, "expert_dim": 16}
ATTENTION = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
TRAIN = {"steps": 2, "tokens_per_step": 512, "micro_batch": 2, "seq_len": 64, "eval_tokens": 64}


def small_spec(folder: Path, *, ranks: int = 1, source: str = "text", name: str = "run", **train: int) -> Path:
    """Write ``<name>.yaml`` and its text into a folder; the run goes to ``<name>`` in the same folder."""
    text, path = folder / "text.txt", folder / f"{name}.yaml"
    text.write_text("a fox jumps over a dog\n" * 200)
    tree = {
        "model": MODEL,
        "attention": ATTENTION,
        "parallel": {"experts": {"ep": ranks}},
        "data": {"use": source, "path": str(text)},
        "train": TRAIN | train,
        "run": {"dir": str(folder / name), "device": "cpu"},
    }
    path.write_text(json.dumps(tree))
    return path
