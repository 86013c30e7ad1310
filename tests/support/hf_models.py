"""Small models of ``transformers`` with drawn options, saved as folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

CLASSES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe": "Glm4Moe",
    "gpt_oss": "GptOss",
    "llama": "Llama",
    "minimax_m2": "MiniMaxM2",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
"""How ``transformers`` calls each family."""
VOCABULARY = 62


@st.composite
def configurations(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw a small configuration: sizes that every family has, and its own options."""
    experts = draw(st.sampled_from([4, 6, 8]))
    rope: dict[str, Any] = draw(st.sampled_from(ROPES))
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": draw(st.sampled_from([24, 32])),
        "intermediate_size": 24,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_experts_per_tok": draw(st.integers(2, experts)),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_theta": draw(st.sampled_from([1e4, 1e6])), **rope},
        "initializer_range": 0.2,
    }
    return shared | draw(OWN[family](experts, shared["num_hidden_layers"]))


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7},
    {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
]


def _heads(own: Mapping[str, Any], *, head_dim: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy of heads, one key head and as many as queries among them, and a family's options."""
    pairs = st.sampled_from([(4, 2), (4, 1), (4, 4), (2, 2)])
    width = {"head_dim": st.sampled_from([4, 8])} if head_dim else {}
    return st.tuples(pairs, st.fixed_dictionaries({**width, **own})).map(
        lambda drawn: {"num_attention_heads": drawn[0][0], "num_key_value_heads": drawn[0][1], **drawn[1]}
    )


def _steps(layers: int) -> dict[str, Any]:
    listed = st.lists(st.integers(0, layers - 1), unique=True, max_size=1)
    return {"decoder_sparse_step": st.integers(1, 2), "mlp_only_layers": listed, "norm_topk_prob": st.booleans()}


def _qwen3(experts: int, layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = {"num_experts": st.just(experts), "moe_intermediate_size": st.just(16), "attention_bias": st.booleans()}
    window = {"use_sliding_window": st.booleans(), "sliding_window": st.sampled_from([3, 40])}
    return _heads({**own, **window, **_steps(layers)})


def _qwen2(experts: int, layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = {"num_experts": st.just(experts), "moe_intermediate_size": st.just(16), "qkv_bias": st.booleans()}
    own |= {"shared_expert_intermediate_size": st.sampled_from([8, 24])}
    window = {"use_sliding_window": st.booleans(), "sliding_window": st.just(3), "max_window_layers": st.integers(0, 3)}
    return _heads({**own, **window, **_steps(layers)}, head_dim=False)


def _mixtral(experts: int, layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return _heads({"num_local_experts": st.just(experts), "sliding_window": st.sampled_from([None, 3, 40])})


def _olmoe(experts: int, layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = {"num_experts": st.just(experts), "norm_topk_prob": st.booleans(), "attention_bias": st.booleans()}
    return _heads({**own, "clip_qkv": st.sampled_from([None, 0.5])}, head_dim=False)


def _gpt_oss(experts: int, layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = {"num_local_experts": st.just(experts), "sliding_window": st.sampled_from([3, 40])}
    kinds = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers)
    own |= {"attention_bias": st.booleans(), "swiglu_limit": st.sampled_from([7.0, 0.5]), "layer_types": kinds}
    return _heads(own)


def _deepseek(experts: int, layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = {"n_routed_experts": st.just(experts), "moe_intermediate_size": st.just(16), "norm_topk_prob": st.booleans()}
    own |= {"q_lora_rank": st.sampled_from([None, 12]), "kv_lora_rank": st.just(10), "attention_bias": st.booleans()}
    own |= {"qk_nope_head_dim": st.sampled_from([6, 8]), "qk_rope_head_dim": st.just(4), "v_head_dim": st.just(5)}
    own |= {"n_shared_experts": st.integers(1, 2), "routed_scaling_factor": st.sampled_from([1.0, 2.5])}
    own |= {"first_k_dense_replace": st.integers(0, layers), "rope_interleave": st.booleans()}
    own |= {"pad_token_id": st.sampled_from([None, 3])}
    own |= {"num_attention_heads": st.sampled_from([2, 4])}
    own |= {"num_experts_per_tok": st.integers(2, experts // 2)}
    return st.tuples(st.fixed_dictionaries(own), st.sampled_from([(1, 1), (2, 1), (2, 2)])).map(
        lambda drawn: {
            **drawn[0],
            **{"num_key_value_heads": drawn[0]["num_attention_heads"]},
            **{"n_group": drawn[1][0], "topk_group": drawn[1][1]},
        }
    )


def _deepseek_v2(experts: int, layers: int) -> st.SearchStrategy[dict[str, Any]]:
    methods = st.sampled_from(["greedy", "group_limited_greedy"])
    only_v3 = {"norm_topk_prob": False, "rope_interleave": None}
    return st.tuples(_deepseek(experts, layers), methods).map(
        lambda drawn: {**drawn[0], "topk_method": drawn[1], **only_v3}
    )


def _glm4(experts: int, layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = {"n_routed_experts": st.just(experts), "moe_intermediate_size": st.just(16), "norm_topk_prob": st.booleans()}
    own |= {"n_shared_experts": st.integers(1, 2), "routed_scaling_factor": st.sampled_from([1.0, 2.5])}
    own |= {"first_k_dense_replace": st.integers(0, layers), "attention_bias": st.booleans()}
    own |= {"partial_rotary_factor": st.sampled_from([0.5, 1.0]), "use_qk_norm": st.booleans()}
    return _heads(own)


def _minimax_m2(experts: int, layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return _heads({"num_local_experts": st.just(experts), "partial_rotary_factor": st.sampled_from([0.5, 1.0])})


OWN = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
}


def theirs(family: str, values: Mapping[str, Any], seed: int = 0) -> Any:
    """Return a model of ``transformers`` with drawn weights, biases and norms among them, in training mode."""
    import transformers

    config = getattr(transformers, f"{CLASSES[family]}Config")(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.2, generator=generator)
            elif "rotary" not in name and "inv_freq" not in name:
                tensor.normal_(0.0, 0.2, generator=generator)
    return model.train()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a saved folder by name."""

    def read() -> Iterator[tuple[str, Tensor]]:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    return dict(read())


SIZES: Mapping[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2},
    **{"tie_word_embeddings": False},
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "head_dim": 8, "moe_intermediate_size": 16},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8, "sliding_window": 5},
    "deepseek_v2": {
        **{"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "pad_token_id": None},
        **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
        **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    },
    "glm4_moe": {
        **{"n_routed_experts": 8, "moe_intermediate_size": 16, "head_dim": 8, "use_qk_norm": True},
        **{"attention_bias": True, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    },
    "minimax_m2": {"num_local_experts": 8, "head_dim": 8, "partial_rotary_factor": 0.5},
    "deepseek_v3": {
        **{"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "pad_token_id": None},
        **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
        **{"num_key_value_heads": 4, "first_k_dense_replace": 1},
    },
}
"""A small model of each family."""


DENSE_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"attention_bias": True, "head_dim": 12},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8},
}
"""A small model of each family without experts."""


def sizes_of(family: str) -> dict[str, Any]:
    """Return the options of a small model of a family, with experts or without."""
    if family in MODELS:
        return {**SIZES, **MODELS[family]}
    return {**{name: size for name, size in SIZES.items() if name != "num_experts_per_tok"}, **DENSE_MODELS[family]}


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a small model of ``transformers``; biases of scores are fp32, as the library keeps them."""
    model = theirs(family, sizes_of(family)).to(dtype)
    for name, tensor in model.named_buffers():
        if "correction_bias" in name:
            tensor.data = tensor.data.float()
    return model


def loaded(oracle: Any, folder: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a folder as ``transformers`` loads them; which ones it keeps in fp32 is its release's affair."""
    state: Mapping[str, Tensor] = type(oracle).from_pretrained(folder, dtype=oracle.dtype).state_dict()
    return state


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two folders have the same tensors, to the bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
