"""Writes a ``config.json`` of a model of ours: what :mod:`moefw.models.huggingface.families` reads, the other way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

Tree = Mapping[str, Any]
"""A section of a resolved spec."""


def dense_layers(model: Tree) -> list[int]:
    """Layers without experts."""
    return sorted({*range(model["num_dense_layers"]), *model["dense_layers"]})


def without_experts(model: Tree) -> bool:
    """Whether no layer has experts."""
    num_layers: int = model["num_layers"]
    return len(dense_layers(model)) == num_layers


ROUTER: Final = "topk"
"""The only router that computes what families of Hugging Face do."""


def computed_routing(routing: Tree) -> dict[str, Any]:
    """Options of a resolved ``ROUTER`` on which logits depend, in a form that is equal where these are."""
    biased = any(rule["kind"] == "expert_bias" for rule in routing["balance"])
    return {
        **{name: routing[name] for name in ("score", "scale", "bias", "groups", "capacity")},
        "pre_softmax": bool(routing["pre_softmax"]),
        "renormalise": routing["renormalise"] is not False,
        "balance": "expert_bias" if biased else "no bias",
    }


def _decoder(model: Tree, attention: Tree) -> dict[str, Any]:
    rope = attention["rope"]
    trained = attention["rope"]["trained_positions"] or 4096
    names = {"kind": "rope_type", "theta": "rope_theta", "trained_positions": "original_max_position_embeddings"}
    said = {names.get(name, name): value for name, value in rope.items() if value is not None and name != "pairs"}
    return {
        "vocab_size": model["vocab_size"],
        "hidden_size": model["dim"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": attention["num_heads"],
        "tie_word_embeddings": model["tie_embeddings"],
        "pad_token_id": model["pad_id"],
        "rms_norm_eps": model["norm_eps"],
        "hidden_act": "silu",
        "rope_parameters": said,
        "max_position_embeddings": int(trained * (rope["factor"] or 1)),
    }


def _grouped(model: Tree, attention: Tree) -> dict[str, Any]:
    heads = {"num_key_value_heads": attention["num_kv_heads"], "head_dim": attention["head_dim"]}
    return {**_decoder(model, attention), **heads}


def _all_dense(model: Tree, attention: Tree) -> dict[str, Any]:
    return {**_grouped(model, attention), "intermediate_size": model["dense_dim"]}


def _llama(model: Tree, attention: Tree) -> dict[str, Any]:
    return {**_all_dense(model, attention), "attention_bias": attention["qkv_bias"]}


def _mistral(model: Tree, attention: Tree) -> dict[str, Any]:
    return {**_all_dense(model, attention), "sliding_window": attention["window"]}


def _dense_qwen2(model: Tree, attention: Tree) -> dict[str, Any]:
    return {
        **_all_dense(model, attention),
        "use_sliding_window": attention["window"] is not None,
        "sliding_window": attention["window"],
        "layer_types": _kinds(model, attention),
    }


def _dense_qwen3(model: Tree, attention: Tree) -> dict[str, Any]:
    return {**_dense_qwen2(model, attention), "attention_bias": attention["qkv_bias"]}


def _some_dense(model: Tree) -> dict[str, Any]:
    return {"mlp_only_layers": dense_layers(model), "decoder_sparse_step": 1, "intermediate_size": model["dense_dim"]}


def _kinds(model: Tree, attention: Tree) -> list[str]:
    full = attention["full_layers"] if attention["window"] is not None else range(model["num_layers"])
    return ["full_attention" if layer in full else "sliding_attention" for layer in range(model["num_layers"])]


def _qwen3(model: Tree, attention: Tree, routing: Tree) -> dict[str, Any]:
    return {
        **_grouped(model, attention),
        **_some_dense(model),
        "num_experts": model["num_experts"],
        "moe_intermediate_size": model["expert_dim"],
        "norm_topk_prob": not routing["pre_softmax"],
        "attention_bias": attention["qkv_bias"],
        "use_sliding_window": attention["window"] is not None,
        "sliding_window": attention["window"],
    }


def _qwen2(model: Tree, attention: Tree, routing: Tree) -> dict[str, Any]:
    return {
        **_grouped(model, attention),
        **_some_dense(model),
        "num_experts": model["num_experts"],
        "moe_intermediate_size": model["expert_dim"],
        "shared_expert_intermediate_size": model["shared_expert_dim"],
        "norm_topk_prob": not routing["pre_softmax"],
        "qkv_bias": attention["qkv_bias"],
        "use_sliding_window": attention["window"] is not None,
        "sliding_window": attention["window"],
        "layer_types": _kinds(model, attention),
    }


def _mixtral(model: Tree, attention: Tree, routing: Tree) -> dict[str, Any]:
    experts = {"num_local_experts": model["num_experts"], "intermediate_size": model["expert_dim"]}
    return {**_grouped(model, attention), **experts, "sliding_window": attention["window"]}


def _olmoe(model: Tree, attention: Tree, routing: Tree) -> dict[str, Any]:
    return {
        **_decoder(model, attention),
        "num_key_value_heads": attention["num_kv_heads"],
        "num_experts": model["num_experts"],
        "intermediate_size": model["expert_dim"],
        "norm_topk_prob": not routing["pre_softmax"],
        "attention_bias": attention["qkv_bias"],
        "clip_qkv": attention["clip"],
    }


def _gpt_oss(model: Tree, attention: Tree, routing: Tree) -> dict[str, Any]:
    return {
        **_grouped(model, attention),
        "num_local_experts": model["num_experts"],
        "intermediate_size": model["expert_dim"],
        "swiglu_limit": model["activation"]["limit"] or 7.0,
        "swiglu_alpha": model["activation"]["alpha"] or 1.702,
        "attention_bias": attention["qkv_bias"],
        "sliding_window": attention["window"] or 128,
        "layer_types": _kinds(model, attention),
    }


def _with_shared_experts(model: Tree, routing: Tree) -> dict[str, Any]:
    groups = routing["groups"] or {"count": 1, "keep": 1}
    width = model["expert_dim"]
    return {
        "n_routed_experts": model["num_experts"],
        "moe_intermediate_size": width,
        "n_shared_experts": model["shared_expert_dim"] // width,
        "intermediate_size": model["dense_dim"],
        "first_k_dense_replace": len(dense_layers(model)),
        "n_group": groups["count"],
        "topk_group": groups["keep"],
        "routed_scaling_factor": routing["scale"],
    }


def _latent(model: Tree, attention: Tree) -> dict[str, Any]:
    return {
        **_decoder(model, attention),
        "num_key_value_heads": attention["num_heads"],
        "q_lora_rank": attention["q_rank"],
        "kv_lora_rank": attention["kv_rank"],
        "qk_nope_head_dim": attention["nope_dim"],
        "qk_rope_head_dim": attention["rope_dim"],
        "v_head_dim": attention["v_dim"],
        "attention_bias": attention["in_bias"],
    }


def _deepseek_v2(model: Tree, attention: Tree, routing: Tree) -> dict[str, Any]:
    return {
        **_latent(model, attention),
        **_with_shared_experts(model, routing),
        "topk_method": "group_limited_greedy" if routing["groups"] else "greedy",
        "norm_topk_prob": False,
    }


def _deepseek_v3(model: Tree, attention: Tree, routing: Tree) -> dict[str, Any]:
    return {
        **_latent(model, attention),
        **_with_shared_experts(model, routing),
        "num_nextn_predict_layers": model["mtp_layers"],
        "norm_topk_prob": routing["renormalise"] is not False,
        "rope_interleave": attention["rope"]["pairs"] == "neighbours",
    }


def _glm4(model: Tree, attention: Tree, routing: Tree) -> dict[str, Any]:
    grouped = _grouped(model, attention)
    return {
        **grouped,
        **_with_shared_experts(model, routing),
        "rope_parameters": _with_rotary_factor(grouped["rope_parameters"]),
        "num_nextn_predict_layers": model["mtp_layers"],
        "norm_topk_prob": routing["renormalise"] is not False,
        "use_qk_norm": attention["qk_norm"] == "head",
        "attention_bias": attention["qkv_bias"],
    }


def _minimax_m2(model: Tree, attention: Tree, routing: Tree) -> dict[str, Any]:
    grouped = _grouped(model, attention)
    return {
        **grouped,
        "rope_parameters": _with_rotary_factor(grouped["rope_parameters"]),
        "num_local_experts": model["num_experts"],
        "intermediate_size": model["expert_dim"],
    }


def _with_rotary_factor(rope: Tree) -> dict[str, Any]:
    """RoPE of a family in which not all values turn, so that the file says so if they do."""
    return {"partial_rotary_factor": 1.0, **rope}


def empty_tensors(config: Tree) -> dict[str, tuple[int, ...]]:
    """Shapes, by name, of the tensors without values that ``transformers`` makes of a configuration.

    A family with shared experts makes them also if there are none: matrices of width 0.
    """
    if config.get("n_shared_experts") != 0:
        return {}
    dim = config["hidden_size"]
    shapes = {"gate_proj": (0, dim), "up_proj": (0, dim), "down_proj": (dim, 0)}
    return {
        f"model.layers.{layer}.mlp.shared_experts.{matrix}.weight": shape
        for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"])
        for matrix, shape in shapes.items()
    }


DENSE_WRITERS: Final[Mapping[str, tuple[str, Callable[[Tree, Tree], dict[str, Any]]]]] = {
    "llama": ("Llama", _llama),
    "mistral": ("Mistral", _mistral),
    "qwen2": ("Qwen2", _dense_qwen2),
    "qwen3": ("Qwen3", _dense_qwen3),
}
"""For each family without experts, all of which have ``gqa``: the name of its classes, and its keys."""

WRITERS: Final[Mapping[str, tuple[str, str, Callable[[Tree, Tree, Tree], dict[str, Any]]]]] = {
    "qwen3_moe": ("Qwen3Moe", "gqa", _qwen3),
    "qwen2_moe": ("Qwen2Moe", "gqa", _qwen2),
    "mixtral": ("Mixtral", "gqa", _mixtral),
    "olmoe": ("Olmoe", "gqa", _olmoe),
    "gpt_oss": ("GptOss", "gqa", _gpt_oss),
    "deepseek_v3": ("DeepseekV3", "mla", _deepseek_v3),
    "deepseek_v2": ("DeepseekV2", "mla", _deepseek_v2),
    "glm4_moe": ("Glm4Moe", "gqa", _glm4),
    "minimax_m2": ("MiniMaxM2", "gqa", _minimax_m2),
}
"""For each family with experts: the name of its classes, its attention, and its keys."""


def configurations(model: Tree, attention: Tree, routing: Tree) -> dict[str, dict[str, Any]]:
    """Configuration of each family with such an attention, whether or not it computes the same model.

    Families without experts are first, and only there if no layer has experts.
    """
    use = attention["use"]
    by_family = {}
    if use == "gqa" and without_experts(model):
        for family, (classes, write) in DENSE_WRITERS.items():
            by_family[family] = {**_named(family, classes), **write(model, attention)}
    experts = {"num_experts_per_tok": model["top_k"]}
    for family, (classes, of_use, write_with_experts) in WRITERS.items():
        if of_use == use:
            by_family[family] = {**_named(family, classes), **experts, **write_with_experts(model, attention, routing)}
    return by_family


def _named(family: str, classes: str) -> dict[str, Any]:
    return {"architectures": [f"{classes}ForCausalLM"], "model_type": family}
