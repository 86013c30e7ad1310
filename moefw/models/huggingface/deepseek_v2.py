"""DeepSeek-V2 (arXiv 2405.04434): latent attention, softmax routing in groups, shared experts."""

from __future__ import annotations

from typing import Any

from moefw.models.huggingface.config import Keys, Sections
from moefw.models.huggingface.deepseek_v3 import (
    BESIDE_EXPERTS,
    LATENT,
    decoder_with_shared_experts,
    groups_of,
    latent_attention,
)
from moefw.models.huggingface.origins import DECODER, Family

IN_GROUPS = "group_limited_greedy"


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    keys.only("mlp_bias", False, default=False)
    return {
        "model": decoder_with_shared_experts(keys, experts=64, width=1407, dense_width=11008, dense_layers=0, shared=2),
        "attention": latent_attention(keys, "neighbours"),
        "routing": _routing(keys),
    }


def _routing(keys: Keys) -> dict[str, Any]:
    keys.only("scoring_func", "softmax", default="softmax")
    keys.only("norm_topk_prob", False, default=False)
    keys.only("output_router_logits", False, default=False)
    keys.only("topk_method", "greedy", IN_GROUPS, default="greedy")
    groups = groups_of(keys, 1, 1, best=1)
    return {
        "use": "topk",
        "score": "softmax",
        "pre_softmax": True,
        "scale": float(keys.take("routed_scaling_factor", default=1.0)),
        "groups": groups if keys.take("topk_method", default="greedy") == IN_GROUPS else None,
    }


FAMILY = Family(sections, (*LATENT, *BESIDE_EXPERTS, *DECODER))
