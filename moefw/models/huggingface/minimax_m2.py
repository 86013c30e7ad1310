"""MiniMax-M2 (https://huggingface.co/MiniMaxAI/MiniMax-M2): grouped-query attention with queries and keys normalised
across heads, half of whose values turn, and sigmoid routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moefw.models.huggingface.config import Keys, Sections, decoder_of, heads_of, rope_of
from moefw.models.huggingface.mixtral import SPARSE_BLOCK
from moefw.models.huggingface.origins import DECODER, Family, Rule, to


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    model = decoder_of(keys)
    eps = keys.take("rms_norm_eps", default=1e-6)
    keys.only("router_jitter_noise", 0, 0.0, default=0.0)
    keys.only("shared_intermediate_size", 0, default=0)
    keys.take("shared_moe_mode", default=None)  # there is no shared expert
    keys.take("mlp_intermediate_size", default=None)  # nor a dense layer
    for scale in ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"):
        keys.only(scale, 1, 1.0, default=1.0)
    keys.only("attention_bias", False, default=False)
    keys.only("use_qk_norm", True, default=True)
    keys.only("qk_norm_type", "per_layer", default="per_layer")
    if not all(keys.take("attn_type_list", default=[])):
        keys.tell("attn_type_list has layers with another attention.", "Supported: 1 for each layer.")
    for predicting in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
        keys.take(predicting, default=None)  # no released file has them
    heads = heads_of(keys)
    width = heads["head_dim"] or 1
    turning = keys.take("rotary_dim", default=width)
    if turning > width:
        keys.tell(f"rotary_dim {turning} is more than head_dim {width}.", "No more values than a head has can turn.")
    return {
        "model": model
        | {
            "norm_eps": eps,
            "num_experts": keys.take("num_local_experts", "num_experts", default=256),
            "expert_dim": keys.take("intermediate_size", default=1536),
        },
        "attention": heads
        | {
            "rope": rope_of(keys, default={"rope_theta": 5e6}, partial=min(1.0, turning / width)),
            "norm_eps": eps,
            "qk_norm": "all",
        },
        "routing": _routing(keys),
    }


def _routing(keys: Keys) -> dict[str, object]:
    keys.only("scoring_func", "sigmoid", default="sigmoid")
    keys.only("use_routing_bias", True, default=True)
    keys.only("output_router_logits", False, default=False)
    return {"use": "topk", "score": "sigmoid", "renormalise": True, "balance": [{"kind": "expert_bias"}]}


BIAS: Final[Sequence[Rule]] = tuple(
    (r"layers\.(\d+)\.moe\.router\.expert_bias", to(f"model.layers.{{}}.{block}.e_score_correction_bias"))
    for block in ("block_sparse_moe", "mlp")
)
"""Where a file holds the bias of scores, the hub's first."""

FAMILY = Family(sections, (*BIAS, *SPARSE_BLOCK, *DECODER))
