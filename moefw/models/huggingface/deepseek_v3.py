"""DeepSeek-V3 (arXiv 2412.19437) and Kimi-K2 (arXiv 2507.20534): latent attention, sigmoid routing, a shared expert."""

from __future__ import annotations

from typing import Any

from moefw.models.huggingface.config import Keys, Sections, decoder_of, rope_of
from moefw.models.huggingface.origins import DECODER, Family, to

ATTENTION = {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm", "kv_a_proj": "kv_a_proj_with_mqa"}


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    model = decoder_of(keys)
    width = keys.take("moe_intermediate_size", default=2048)
    keys.only("scoring_func", "sigmoid", default="sigmoid")
    keys.only("topk_method", "noaux_tc", default="noaux_tc")
    keys.only("moe_layer_freq", 1, default=1)
    for derived in ("head_dim", "qk_head_dim", "num_key_value_heads"):
        keys.take(derived, default=None)
    keys.take("num_nextn_predict_layers", "num_mtp_layers", default=0)  # a spec says whether they are trained
    bias = keys.take("attention_bias", default=False)
    interleaved = keys.take("rope_interleave", default=True)
    return {
        "model": model
        | {
            "norm_eps": keys.take("rms_norm_eps", default=1e-6),
            "num_experts": keys.take("n_routed_experts", "num_local_experts", default=256),
            "expert_dim": width,
            "dense_dim": keys.take("intermediate_size", default=18432),
            "num_dense_layers": min(keys.take("first_k_dense_replace", default=3), model["num_layers"] or 0),
            "shared_expert_dim": (keys.take("n_shared_experts", default=1) or 0) * width,
        },
        "attention": {
            "use": "mla",
            "num_heads": keys.take("num_attention_heads"),
            "q_rank": keys.take("q_lora_rank", default=None if keys.has("q_lora_rank") else 1536),
            "kv_rank": keys.take("kv_lora_rank", default=512),
            "nope_dim": keys.take("qk_nope_head_dim", default=128),
            "rope_dim": keys.take("qk_rope_head_dim", default=64),
            "v_dim": keys.take("v_head_dim", default=128),
            "rope": rope_of(keys, "neighbours" if interleaved else "halves"),
            "in_bias": bias,
            "out_bias": bias,
        },
        "routing": _routing(keys),
    }


def _routing(keys: Keys) -> dict[str, Any]:
    keys.only("output_router_logits", False, default=False)
    count = keys.take("n_group", default=8)
    keep = keys.take("topk_group", default=4)
    return {
        "use": "topk",
        "score": "sigmoid",
        "renormalise": keys.take("norm_topk_prob", default=True),
        "scale": float(keys.take("routed_scaling_factor", default=2.5)),
        "groups": {"count": count, "keep": keep, "best": 2} if keep < count else None,
        "balance": [{"kind": "expert_bias"}],
    }


FAMILY = Family(
    sections,
    (
        *(
            (rf"layers\.(\d+)\.attention\.{ours}\.(.*)", to(f"model.layers.{{}}.self_attn.{theirs}.{{}}"))
            for ours, theirs in ATTENTION.items()
        ),
        (r"layers\.(\d+)\.(enorm|hnorm|eh_proj)\.weight", to("model.layers.{}.{}.weight")),
        (r"layers\.(\d+)\.post_norm\.weight", to("model.layers.{}.shared_head.norm.weight")),
        (r"layers\.(\d+)\.moe\.router\.expert_bias", to("model.layers.{}.mlp.gate.e_score_correction_bias")),
        (r"layers\.(\d+)\.moe\.shared_expert\.(.*)", to("model.layers.{}.mlp.shared_experts.{}")),
        *DECODER,
    ),
)
