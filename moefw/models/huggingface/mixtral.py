"""Mixtral (arXiv 2401.04088): every layer has experts, chosen by softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moefw.models.huggingface.config import Keys, Sections, balance_of, decoder_of, heads_of, rope_of
from moefw.models.huggingface.origins import DECODER, Family, Origin, Rule, to

WEIGHTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def sections(keys: Keys) -> Sections:
    """Sections of a spec, options by section, that describe the model of a configuration."""
    model = decoder_of(keys)
    eps = keys.take("rms_norm_eps", default=1e-5)
    keys.only("router_jitter_noise", 0, 0.0, default=0.0)
    return {
        "model": model
        | {
            "norm_eps": eps,
            "num_experts": keys.take("num_local_experts", "num_experts", default=8),
            "expert_dim": keys.take("intermediate_size", default=14336),
        },
        "attention": heads_of(keys)
        | {
            "rope": rope_of(keys),
            "norm_eps": eps,
            "qk_norm": "none",
            "window": keys.take("sliding_window", default=None),
        },
        "routing": {"use": "topk", "score": "softmax", **balance_of(keys)},
    }


SPARSE_BLOCK: Final[Sequence[Rule]] = (
    (r"layers\.(\d+)\.moe\.router\.weight", to("model.layers.{}.block_sparse_moe.gate.weight")),
    (
        r"layers\.(\d+)\.moe\.experts\.(\d+)\.(.*)\.weight",
        lambda layer, expert, part: Origin(
            f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{WEIGHTS[part]}.weight"
        ),
    ),
)
"""Where a file holds the router and the experts."""

FAMILY = Family(sections, (*SPARSE_BLOCK, *DECODER))
