"""gpt-oss (arXiv 2508.10925): windows in every other layer, sinks, biases, clamped experts."""

from __future__ import annotations

from moefw.models.huggingface.config import Keys, Sections, balance_of, decoder_of, heads_of, rope_of, windows_of
from moefw.models.huggingface.origins import DECODER, Family, Origin, to

YARN = {
    **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 4096},
}
PARTS = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
"""Gate and up of an expert are interleaved."""


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    model = decoder_of(keys)
    eps = keys.take("rms_norm_eps", default=1e-5)
    bias = keys.take("attention_bias", default=True)
    layers = range(model["num_layers"] or 0)
    alternating = ["full_attention" if n % 2 else "sliding_attention" for n in layers]
    window = keys.take("sliding_window", default=128)
    limit = keys.take("swiglu_limit", default=7.0)
    alpha = keys.take("swiglu_alpha", default=1.702)
    keys.take("num_experts_per_tok", "experts_per_token", default=None)  # the hub's files have both
    keys.take("initial_context_length", default=None)  # RoPE has the trained length
    return {
        "model": model
        | {
            "norm_eps": eps,
            "num_experts": keys.take("num_local_experts", "num_experts", default=128),
            "expert_dim": keys.take("intermediate_size", default=2880),
            "activation": {"kind": "clamped_swiglu", "limit": limit, "alpha": alpha},
            "biased_experts": True,
        },
        "attention": heads_of(keys)
        | {
            "rope": rope_of(keys, default=YARN),
            "norm_eps": eps,
            "qk_norm": "none",
            "qkv_bias": bias,
            "out_bias": bias,
            **windows_of(keys, alternating, window),
            "sinks": True,
        },
        "routing": {"use": "topk", "score": "softmax", "bias": True, **balance_of(keys)},
    }


def _weight(layer: str, expert: str, part: str) -> Origin:
    experts = f"model.layers.{layer}.mlp.experts"
    number = int(expert)
    if part == "down_proj":
        return Origin(f"{experts}.down_proj", (number,), transposed=True)
    return Origin(f"{experts}.gate_up_proj", (number, slice(None), PARTS[part]), transposed=True)


def _bias(layer: str, expert: str, part: str) -> Origin:
    experts = f"model.layers.{layer}.mlp.experts"
    number = int(expert)
    if part == "down_proj":
        return Origin(f"{experts}.down_proj_bias", (number,))
    return Origin(f"{experts}.gate_up_proj_bias", (number, PARTS[part]))


FAMILY = Family(
    sections,
    (
        (r"layers\.(\d+)\.attention\.sinks\.weight", to("model.layers.{}.self_attn.sinks")),
        (r"layers\.(\d+)\.moe\.router\.(.*)", to("model.layers.{}.mlp.router.{}")),
        (r"layers\.(\d+)\.moe\.experts\.(\d+)\.(.*)\.weight", _weight),
        (r"layers\.(\d+)\.moe\.experts\.(\d+)\.(.*)\.bias", _bias),
        *DECODER,
    ),
)
