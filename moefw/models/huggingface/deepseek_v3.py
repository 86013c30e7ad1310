"""DeepSeek-V3 (arXiv 2412.19437) and Kimi-K2 (arXiv 2507.20534): latent attention, sigmoid routing, a shared expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from moefw.models.huggingface.config import Keys, Sections, decoder_of, rope_of
from moefw.models.huggingface.origins import DECODER, Family, Rule, to


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    keys.only("topk_method", "noaux_tc", default="noaux_tc")
    read_mtp_layers(keys)
    interleaved = keys.take("rope_interleave", default=True)
    return {
        "model": decoder_with_shared_experts(keys, experts=256, width=2048, dense_width=18432, dense_layers=3),
        "attention": latent_attention(keys, "neighbours" if interleaved else "halves"),
        "routing": sigmoid_routing(keys, groups=8, kept=4, scale=2.5),
    }


def read_mtp_layers(keys: Keys) -> None:
    """Read how many layers predict further tokens, which changes nothing: a spec says whether they are trained."""
    keys.take("num_nextn_predict_layers", "num_mtp_layers", default=0)


def decoder_with_shared_experts(
    keys: Keys, *, experts: int, width: int, dense_width: int, dense_layers: int, eps: float = 1e-6, shared: int = 1
) -> dict[str, Any]:
    """Options of ``model:`` of a family with shared experts and dense first layers. All others: its defaults."""
    model = decoder_of(keys)
    keys.only("moe_layer_freq", 1, default=1)
    expert_width = keys.take("moe_intermediate_size", default=width)
    return model | {
        "norm_eps": keys.take("rms_norm_eps", default=eps),
        "num_experts": keys.take("n_routed_experts", "num_local_experts", default=experts),
        "expert_dim": expert_width,
        "dense_dim": keys.take("intermediate_size", default=dense_width),
        "num_dense_layers": min(keys.take("first_k_dense_replace", default=dense_layers), model["num_layers"] or 0),
        "shared_expert_dim": (keys.take("n_shared_experts", default=shared) or 0) * expert_width,
    }


def latent_attention(keys: Keys, pairs: str) -> dict[str, Any]:
    """Options of a latent attention. ``pairs``: the values that turn together."""
    for derived in ("head_dim", "qk_head_dim", "num_key_value_heads"):
        keys.take(derived, default=None)
    bias = keys.take("attention_bias", default=False)
    return {
        "use": "mla",
        "num_heads": keys.take("num_attention_heads"),
        "q_rank": keys.take("q_lora_rank", default=None if keys.has("q_lora_rank") else 1536),
        "kv_rank": keys.take("kv_lora_rank", default=512),
        "nope_dim": keys.take("qk_nope_head_dim", default=128),
        "rope_dim": keys.take("qk_rope_head_dim", default=64),
        "v_dim": keys.take("v_head_dim", default=128),
        "rope": rope_of(keys, pairs),
        "in_bias": bias,
        "out_bias": bias,
    }


def sigmoid_routing(keys: Keys, *, groups: int, kept: int, scale: float) -> dict[str, Any]:
    """Routing by sigmoid with a bias on the scores, in the best groups. All others: a family's defaults."""
    keys.only("scoring_func", "sigmoid", default="sigmoid")
    keys.only("output_router_logits", False, default=False)
    return {
        "use": "topk",
        "score": "sigmoid",
        "renormalise": keys.take("norm_topk_prob", default=True),
        "scale": float(keys.take("routed_scaling_factor", default=scale)),
        "groups": groups_of(keys, groups, kept, best=2),
        "balance": [{"kind": "expert_bias"}],
    }


def groups_of(keys: Keys, count: int, kept: int, *, best: int) -> dict[str, int] | None:
    """Groups of experts, of which a token uses the best; None if it uses all. ``best``: experts that score a group."""
    count = keys.take("n_group", default=count)
    kept = keys.take("topk_group", default=kept)
    return {"count": count, "keep": kept, "best": best} if kept < count else None


BESIDE_EXPERTS: Final[Sequence[Rule]] = (
    (r"layers\.(\d+)\.(enorm|hnorm|eh_proj)\.weight", to("model.layers.{}.{}.weight")),
    (r"layers\.(\d+)\.post_norm\.weight", to("model.layers.{}.shared_head.norm.weight")),
    (r"layers\.(\d+)\.moe\.router\.expert_bias", to("model.layers.{}.mlp.gate.e_score_correction_bias")),
    (r"layers\.(\d+)\.moe\.shared_expert\.(.*)", to("model.layers.{}.mlp.shared_experts.{}")),
)
"""Where a file holds layers that predict further tokens, biases of scores, and shared experts."""
LATENT: Final[Sequence[Rule]] = tuple(
    (rf"layers\.(\d+)\.attention\.{ours}\.(.*)", to(f"model.layers.{{}}.self_attn.{theirs}.{{}}"))
    for ours, theirs in (
        ("q_a_norm", "q_a_layernorm"),
        ("kv_a_norm", "kv_a_layernorm"),
        ("kv_a_proj", "kv_a_proj_with_mqa"),
    )
)
"""Where it holds the parts of a latent attention that it calls otherwise."""

FAMILY = Family(sections, (*LATENT, *BESIDE_EXPERTS, *DECODER))
