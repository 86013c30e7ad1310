"""GLM-4.5 (arXiv 2508.06471): grouped-query attention, half of whose values turn, sigmoid routing, a shared expert."""

from __future__ import annotations

from moefw.models.huggingface.config import Keys, Sections, heads_of, rope_of
from moefw.models.huggingface.deepseek_v3 import (
    BESIDE_EXPERTS,
    decoder_with_shared_experts,
    read_mtp_layers,
    sigmoid_routing,
)
from moefw.models.huggingface.origins import DECODER, Family


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    read_mtp_layers(keys)
    model = decoder_with_shared_experts(keys, experts=128, width=1408, dense_width=10944, dense_layers=1, eps=1e-5)
    return {
        "model": model,
        "attention": heads_of(keys)
        | {
            "rope": rope_of(keys, partial=0.5),
            "norm_eps": model["norm_eps"],
            "qk_norm": "head" if keys.take("use_qk_norm", default=False) else "none",
            "qkv_bias": keys.take("attention_bias", default=False),
        },
        "routing": sigmoid_routing(keys, groups=1, kept=1, scale=1.0),
    }


FAMILY = Family(sections, (*BESIDE_EXPERTS, *DECODER))
