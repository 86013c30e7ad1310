"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with normalised heads, softmax routing."""

from __future__ import annotations

from moefw.models.huggingface.config import Keys, Sections, balance_of, decoder_of, heads_of, rope_of
from moefw.models.huggingface.origins import DECODER, Family


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    model = decoder_of(keys)
    eps = keys.take("rms_norm_eps", default=1e-6)
    bias = keys.take("attention_bias", default=False)
    window = keys.take("sliding_window", default=4096)
    keys.take("max_window_layers", default=None)
    # The hub's files of Qwen3-Coder have these; ``transformers`` reads none of them.
    keys.only("qkv_bias", bias, default=bias)
    keys.only("use_qk_norm", True, default=True)
    keys.only("shared_expert_intermediate_size", 0, default=0)
    return {
        "model": model
        | {
            "norm_eps": eps,
            "num_experts": keys.take("num_local_experts", "num_experts", default=128),
            "expert_dim": keys.take("moe_intermediate_size", default=768),
            "dense_dim": keys.take("intermediate_size", default=6144),
            "dense_layers": every_step(keys, model["num_layers"]),
        },
        "attention": heads_of(keys)
        | {
            "rope": rope_of(keys),
            "norm_eps": eps,
            "qk_norm": "head",
            "qkv_bias": bias,
            "out_bias": bias,
            "window": window if keys.take("use_sliding_window", default=False) else None,
        },
        "routing": softmax_routing(keys),
    }


def every_step(keys: Keys, num_layers: int | None) -> list[int]:
    """Dense layers: those listed, and all but every ``decoder_sparse_step``-th."""
    listed = keys.take("mlp_only_layers", default=[])
    step = keys.take("decoder_sparse_step", default=1)
    return [layer for layer in range(num_layers or 0) if layer in listed or (layer + 1) % step]


def softmax_routing(keys: Keys, coeff: float = 0.001) -> dict[str, object]:
    """Routing by softmax, whose weights sum to one if ``norm_topk_prob``. ``coeff``: see ``balance_of``."""
    normalised = keys.take("norm_topk_prob", default=False)
    routing = {"use": "topk", "score": "softmax", "pre_softmax": None if normalised else True}
    return routing | balance_of(keys, coeff)


FAMILY = Family(sections, DECODER)
