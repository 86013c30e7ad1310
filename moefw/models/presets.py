"""Named models for ``model: {preset: ...}``, by section of a spec. What a spec says overrides them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "qwen3-moe-tiny": {
        "model": {
            "dim": 256,
            "num_layers": 3,
            "num_experts": 16,
            "top_k": 4,
            "expert_dim": 128,
        },
        "attention": {"use": "gqa", "num_heads": 2, "num_kv_heads": 1, "head_dim": 128},
    },
    "qwen3-30b-a3b": {
        "model": {
            "vocab_size": 151936,
            "dim": 2048,
            "num_layers": 48,
            "num_experts": 128,
            "top_k": 8,
            "expert_dim": 768,
        },
        "attention": {"use": "gqa", "num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "rope": {"theta": 1000000.0}},
    },
    "qwen3-235b-a22b": {
        "model": {
            "vocab_size": 151936,
            "dim": 4096,
            "num_layers": 94,
            "num_experts": 128,
            "top_k": 8,
            "expert_dim": 1536,
        },
        "attention": {"use": "gqa", "num_heads": 64, "num_kv_heads": 4, "head_dim": 128, "rope": {"theta": 1000000.0}},
    },
}
