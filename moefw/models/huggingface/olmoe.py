"""OLMoE (arXiv 2409.02060): queries and keys normalised across all heads, optionally clipped."""

from __future__ import annotations

from moefw.models.huggingface.config import Keys, Sections, decoder_of, heads_of, rope_of
from moefw.models.huggingface.origins import DECODER, Family
from moefw.models.huggingface.qwen3_moe import softmax_routing


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    model = decoder_of(keys)
    eps = keys.take("rms_norm_eps", default=1e-5)
    bias = keys.take("attention_bias", default=False)
    return {
        "model": model
        | {
            "norm_eps": eps,
            "num_experts": keys.take("num_experts", "num_local_experts", default=64),
            "expert_dim": keys.take("intermediate_size", default=2048),
        },
        "attention": heads_of(keys, head_dim=False)
        | {
            "rope": rope_of(keys),
            "norm_eps": eps,
            "qk_norm": "all",
            "clip": keys.take("clip_qkv", default=None),
            "qkv_bias": bias,
            "out_bias": bias,
        },
        "routing": softmax_routing(keys, 0.01),
    }


FAMILY = Family(sections, DECODER)
