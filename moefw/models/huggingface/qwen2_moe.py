"""Qwen2-MoE (arXiv 2407.10671): biases of queries, keys and values, a gated shared expert."""

from __future__ import annotations

from moefw.models.huggingface.config import Keys, Sections, decoder_of, heads_of, rope_of, windows_of
from moefw.models.huggingface.origins import DECODER, Family, Origin, to
from moefw.models.huggingface.qwen3_moe import every_step, softmax_routing


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    model = decoder_of(keys)
    eps = keys.take("rms_norm_eps", default=1e-6)
    layers = range(model["num_layers"] or 0)
    windowed = keys.take("use_sliding_window", default=False)
    window = keys.take("sliding_window", default=4096)
    below = keys.take("max_window_layers", default=28)
    alternating = ["sliding_attention" if not n % 2 and n < below and windowed else "full_attention" for n in layers]
    return {
        "model": model
        | {
            "norm_eps": eps,
            "num_experts": keys.take("num_experts", "num_local_experts", default=60),
            "expert_dim": keys.take("moe_intermediate_size", default=1408),
            "dense_dim": keys.take("intermediate_size", default=5632),
            "dense_layers": every_step(keys, model["num_layers"]),
            "shared_expert_dim": keys.take("shared_expert_intermediate_size", default=5632),
            "shared_expert_gate": True,
        },
        "attention": heads_of(keys)
        | {
            "rope": rope_of(keys),
            "norm_eps": eps,
            "qk_norm": "none",
            "qkv_bias": keys.take("qkv_bias", default=True),
            **windows_of(keys, alternating, window),
        },
        "routing": softmax_routing(keys),
    }


FAMILY = Family(
    sections,
    (
        (r"layers\.(\d+)\.moe\.shared_expert\.mlp\.(.*)", to("model.layers.{}.mlp.shared_expert.{}")),
        (
            r"layers\.(\d+)\.moe\.shared_expert\.gate",
            lambda layer: Origin(f"model.layers.{layer}.mlp.shared_expert_gate.weight", (0,)),
        ),
        *DECODER,
    ),
)
