"""What ranks of cp hold and send, as `moefw plan` measures it, is the closed form of each algorithm."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ledger_cases import assembly_of, in_all
from moefw.planner import Ledger, ledger
from moefw.testing.training import SMALL

HEADS, GROUPS, WIDTH, LAYERS, LENGTH = 8, 4, 8, 2, 64
FP32 = 4


@cache
def planned(cp: int, algorithm: str = "allgather_kv") -> Ledger:
    spec: dict[str, Any] = {
        **SMALL,
        "model": {**SMALL["model"], "num_layers": LAYERS},
        "attention": {"use": "gqa", "num_heads": HEADS, "num_kv_heads": GROUPS, "head_dim": WIDTH},
        "train": {**SMALL["train"], "tokens_per_step": LENGTH, "micro_batch": 1, "seq_len": LENGTH},
        "parallel": {"dense": {"cp": cp}, "ranks_per_node": cp},
        "context_parallel": {"use": algorithm},
    }
    return ledger(assembly_of(spec, cp))


def sent(cp: int, algorithm: str) -> dict[str, int]:
    """Return the bytes that a rank sends to others of cp in all layers, by phase."""
    total = {"forward": 0, "backward": 0}
    for (phase, one), times in in_all(planned(cp, algorithm).work, "transfers").items():
        if one.kind != "all-reduce":
            total[phase] += (one.node + one.network) * times
    return total


@pytest.mark.parametrize("cp", [2, 4])
def test_bytes_are_the_closed_form(cp: int) -> None:
    positions = LENGTH // cp
    kv, q = 2 * GROUPS * WIDTH * positions * FP32, HEADS * WIDTH * positions * FP32
    others = (cp - 1) * kv * LAYERS
    assert sent(cp, "allgather_kv") == {"forward": others, "backward": 2 * others}
    assert sent(cp, "ring_attention") == {"forward": others, "backward": 2 * others + kv * LAYERS}
    heads = (2 * q + kv) * (cp - 1) // cp * LAYERS
    assert sent(cp, "ulysses") == {"forward": heads, "backward": heads}


@pytest.mark.parametrize("algorithm", ["allgather_kv", "ring_attention", "ulysses"])
def test_activations_fall_as_one_over_cp(algorithm: str) -> None:
    whole = sum(region.saved for region in planned(1).regions)
    for cp in (2, 4):
        share = sum(region.saved for region in planned(cp, algorithm).regions) * cp / whole
        assert share == pytest.approx(1.0, abs=0.1), cp
