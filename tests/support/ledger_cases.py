"""Worlds and policies whose steps are measured, and comparisons of the ledger with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from moefw.compose.assembly import Assembly
from moefw.planner import Ledger, ledger
from moefw.testing.fake_world import fake_assembly
from moefw.testing.measured import Measured, measure

SAVED, PEAK = 0.01, 0.03
"""Allowed relative errors of predictions."""
SCALARS = 512
"""Bytes that PyTorch 2.11 keeps in addition to the tokens, some for each parameter."""
KEY_BYTES = 8
"""The key of a token, from which nvfp4 draws."""

MODEL = {
    "vocab_size": 512,
    "dim": 256,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "dense_dim": 512,
    "num_experts": 16,
    "top_k": 4,
    "expert_dim": 128,
}
TRAIN = {"micro_batch": 2, "seq_len": 256, "tokens_per_step": 4096}
BRIEF = {**TRAIN, "tokens_per_step": 2048}
"""One micro-batch where dp is 4."""
RUN = {"device": "cpu"}
SHARED_OUT: dict[str, Any] = {
    "model": {**MODEL, "num_layers": 3, "num_dense_layers": 1},
    "precision": {"use": "bf16"},
    "parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 4, "shard": "all"}},
    "train": TRAIN,
    "run": RUN,
}
LOOPING: dict[str, Any] = {
    "model": {**MODEL, "shared_expert_dim": 128, "qk_norm": False},
    "routing": {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias"}, {"kind": "z_loss"}]},
    "gemm": {"use": "loop"},
    "parallel": {"experts": {"ep": 4}},
    "train": TRAIN,
    "run": RUN,
}
ONCE_A_RANK: dict[str, Any] = {
    "model": MODEL,
    "precision": {"use": "bf16"},
    "routing": {"use": "topk", "balance": [{"kind": "aux_loss", "over": "sequence"}]},
    "dispatch": {"use": "deepep", "backend": "torch"},
    "parallel": {"experts": {"ep": 4}},
    "train": TRAIN,
    "run": RUN,
}
IN_PARTS: dict[str, Any] = {
    "model": {**MODEL, "tie_embeddings": True},
    "precision": {"use": "bf16"},
    "routing": {"use": "forced"},
    "dispatch": {"use": "allgather"},
    "parallel": {"dense": {"tp": 2}, "experts": {"ep": 2, "etp": 2, "shard": 2}},
    "train": TRAIN,
    "run": RUN,
}
WORLDS = {
    "sharded": (SHARED_OUT, 8),
    "looping": (LOOPING, 4),
    "once a rank": (ONCE_A_RANK, 4),
    "in parts": (IN_PARTS, 8),
}


def recompute(*regions: str) -> dict[str, Any]:
    return {"use": "recompute", "regions": list(regions)}


def offload(*regions: str) -> dict[str, Any]:
    return {"use": "offload", "regions": list(regions), "min_bytes": 1}


POLICIES: dict[str, list[dict[str, Any]]] = {
    "keep": [{"use": "keep", "regions": ["attention"]}],
    "norms and dispatch": [recompute("attn_norm", "mlp_norm", "dispatch")],
    "layer": [recompute("layer")],
    "inside": [recompute("qkv", "router", "expert_fc1")],
    "offload": [offload("experts")],
    "offload and recompute": [offload("attention"), recompute("attn_norm", "experts")],
}


def with_policies(tree: Mapping[str, Any], *policies: Mapping[str, Any]) -> dict[str, Any]:
    return {**tree, "memory": list(policies)}


def predicted(measured: Measured, assembly: Assembly) -> Ledger:
    return ledger(assembly, micro_batches=measured.micro_batches)


def check_held(found: Ledger, measured: Measured) -> None:
    held = found.held
    assert held is not None
    kinds = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
    }
    kinds |= {"buffers": held.buffers} if held.buffers else {}
    assert measured.held == {**kinds, "other": pytest.approx(held.batch, abs=SCALARS)}


def by_region(saved: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by region; of a dispatcher's indices, some are made in ``dispatch`` and some in ``layer``."""
    movement = {"dispatch": saved.get("dispatch", 0) + saved.get("layer", 0)}
    return {name: nbytes for name, nbytes in {**saved, **movement}.items() if nbytes and name != "layer"}


def check_saved(found: Ledger, measured: Measured, *, roaming: int = 512) -> None:
    """Compare saved bytes. ``roaming``: bytes that may count where they are first saved or where they are made."""
    saved: Counter[str] = Counter()
    for row in found.regions:
        saved[row.region] += row.saved
    assert by_region(saved) == pytest.approx(by_region(measured.by_region()), rel=SAVED, abs=roaming)
    assert found.totals["saved"] == pytest.approx(measured.saved_bytes, rel=SAVED)


def check(assembly: Assembly) -> None:
    measured = measure(assembly)
    found = predicted(measured, assembly)
    assert not found.silent
    check_held(found, measured)
    if all(not plugin.runs_again or "layer" not in plugin.regions for plugin in assembly.parts.memory):
        check_saved(found, measured)
    assert found.totals["saved"] == pytest.approx(measured.saved_bytes, rel=SAVED)
    assert found.peak_bytes == pytest.approx(measured.peak, rel=PEAK), (found.peak, measured.peak_place)


def check_quantized(tree: Mapping[str, Any], ranks: int) -> None:
    """Compare held and saved bytes with a step whose quantization is not counted."""
    assembly = fake_assembly(tree, ranks)
    measured = measure(assembly)
    found = predicted(measured, assembly)
    check_held(found, measured)
    train = tree["train"]
    check_saved(found, measured, roaming=max(512, train["micro_batch"] * train["seq_len"] * KEY_BYTES))
    assert found.silent == (f"precision: {assembly.parts.precision.name}, while it quantizes",)
