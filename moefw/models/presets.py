"""Named models for ``model: {preset: ...}``: published configurations of Hugging Face, and small twins of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moefw.models.huggingface.config import Keys
from moefw.models.huggingface.families import FAMILIES

_DEEPSEEK: Final = {
    **{"vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432},
    **{"num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048},
    **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
}
_DEEPSEEK_V2: Final = {
    **{"vocab_size": 102400, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
}
_GLM: Final = {
    **{"vocab_size": 151552, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
    **{"attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1.0e6},
    **{"num_experts_per_tok": 8, "n_shared_experts": 1},
}
_QWEN3: Final = {
    **{"vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1.0e6},
    **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
}
_MIXTRAL: Final = {
    **{"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1.0e6},
}
_GPT_OSS: Final = {
    **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "sliding_window": 128},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4},
}


def _yarn(**options: Any) -> dict[str, Any]:
    return {"type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0} | options


def _yarn_of_v2() -> dict[str, Any]:
    return _yarn(factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707)


PUBLISHED: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK | {"rope_scaling": _yarn(factor=40.0, beta_fast=32.0, beta_slow=1.0)}),
    "kimi-k2": (
        "kimi_k2",
        _DEEPSEEK
        | {"vocab_size": 163840, "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0}
        | {"rope_scaling": _yarn(factor=32.0, beta_fast=1.0, beta_slow=1.0)},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        _DEEPSEEK_V2
        | {"hidden_size": 5120, "num_hidden_layers": 60, "intermediate_size": 12288, "num_attention_heads": 128}
        | {"q_lora_rank": 1536, "n_routed_experts": 160, "moe_intermediate_size": 1536, "routed_scaling_factor": 16.0}
        | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "rope_scaling": _yarn_of_v2()},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        _DEEPSEEK_V2
        | {"hidden_size": 2048, "num_hidden_layers": 27, "intermediate_size": 10944, "num_attention_heads": 16}
        | {"q_lora_rank": None, "n_routed_experts": 64, "moe_intermediate_size": 1408, "rope_scaling": _yarn_of_v2()},
    ),
    "glm-4.5": (
        "glm4_moe",
        _GLM
        | {"hidden_size": 5120, "num_hidden_layers": 92, "intermediate_size": 12288, "first_k_dense_replace": 3}
        | {"n_routed_experts": 160, "moe_intermediate_size": 1536, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    ),
    "glm-4.5-air": (
        "glm4_moe",
        _GLM
        | {"hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10944, "first_k_dense_replace": 1}
        | {"n_routed_experts": 128, "moe_intermediate_size": 1408},
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            **{"vocab_size": 200064, "hidden_size": 3072, "num_hidden_layers": 62, "intermediate_size": 1536},
            **{"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5},
            **{"num_local_experts": 256, "num_experts_per_tok": 8, "rope_theta": 5.0e6},
        },
    ),
    "qwen3-235b-a22b": (
        "qwen3_moe",
        _QWEN3
        | {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536},
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        _QWEN3
        | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768},
    ),
    "qwen2-57b-a14b": (
        "qwen2_moe",
        {
            **{"vocab_size": 151936, "hidden_size": 3584, "num_hidden_layers": 28, "rope_theta": 1.0e6},
            **{"num_attention_heads": 28, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "norm_topk_prob": False},
        },
    ),
    "mixtral-8x7b": (
        "mixtral",
        _MIXTRAL
        | {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"intermediate_size": 14336},
    ),
    "mixtral-8x22b": (
        "mixtral",
        _MIXTRAL
        | {"vocab_size": 32768, "hidden_size": 6144, "num_hidden_layers": 56, "num_attention_heads": 48}
        | {"intermediate_size": 16384},
    ),
    "olmoe-1b-7b": (
        "olmoe",
        {
            **{"vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 1024},
            **{"num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
            "pad_token_id": 1,
        },
    ),
    "gpt-oss-120b": ("gpt_oss", _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}),
    "gpt-oss-20b": ("gpt_oss", _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}),
    "qwen3-moe-tiny": (
        "qwen3_moe",
        {
            **{"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 1024},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "norm_topk_prob": True},
            **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
        },
    ),
}
"""Family and configuration of each model, as published, and of the quickstart's."""

SMALL: Final[Mapping[str, Any]] = {
    **{"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64},
    **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "first_k_dense_replace": 1},
    **{"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4},
}
"""The sizes of small twins. They have what their configuration has, so that all else is alike."""


TWIN: Final = "-tiny"


def preset_sections(name: str) -> Mapping[str, Mapping[str, Any]] | None:
    """Sections of a spec that the name of a model, or of its small twin, fills; None: it is unknown."""
    published = name if name in PUBLISHED else name.removesuffix(TWIN)
    if published not in PUBLISHED:
        return None
    family, values = PUBLISHED[published]
    if published != name:
        values = {key: value if value is None else SMALL.get(key, value) for key, value in values.items()}
    return FAMILIES[family].sections(Keys(values))


PRESETS: Final = tuple(PUBLISHED) + tuple(f"{name}{TWIN}" for name in PUBLISHED if not name.endswith(TWIN))
"""The names of all presets."""
