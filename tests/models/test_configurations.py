"""A configuration says in a spec all that it says, or is refused with every option that is not supported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hf_models import CLASSES
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import MoefwError
from moefw.core.site import Machine
from moefw.models.huggingface.config import NEUTRAL
from moefw.models.presets import PRESETS, PUBLISHED

TINY: Mapping[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_experts_per_tok": 2},
}
"""What a configuration of every family must say."""


def resolved(preset: str, **sections: Any) -> Any:
    tree = {"model": {"preset": preset, **sections.pop("model", {})}, "run": {"device": "cpu"}, **sections}
    return assemble_tree(tree, Marks("spec"), defaults=defaults(), machine=Machine(device="cpu")).resolved()


def written(folder: Path, values: Mapping[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return f"{folder}/config.json"


def complaints(folder: Path, family: str, **values: Any) -> str:
    with pytest.raises(MoefwError) as caught:
        resolved(written(folder, {"model_type": family, **TINY, **values}))
    return "\n".join(str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_what_transformers_saves_of_it(name: str, tmp_path: Path) -> None:
    """With the keys of the current library, defaults and all."""
    import transformers

    family, values = PUBLISHED[name]
    kind = CLASSES["deepseek_v3" if family == "kimi_k2" else family]
    getattr(transformers, f"{kind}Config")(**values).save_pretrained(tmp_path)
    assert resolved(f"{tmp_path}") == resolved(name)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_sound(name: str) -> None:
    assert resolved(name)["model"]["num_layers"] > 0


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-tiny") and name != "qwen3-moe-tiny"])
def test_a_tiny_twin_differs_in_sizes_alone(name: str) -> None:
    def words(tree: Any) -> Any:
        if isinstance(tree, Mapping):
            return {key: words(value) for key, value in tree.items() if key not in ("dense_layers", "full_layers")}
        return tree if isinstance(tree, str | bool | type(None)) else type(tree)

    tiny, whole = words(resolved(name)), words(resolved(name.removesuffix("-tiny")))
    assert {key: tiny[key] for key in ("model", "attention", "routing")} == {
        key: whole[key] for key in ("model", "attention", "routing")
    }


def test_the_hubs_names_of_keys_and_the_librarys_mean_the_same(tmp_path: Path) -> None:
    yarn = {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    hub = {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **yarn}, "n_routed_experts": 8, "n_group": 1}
    now = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **yarn}, "num_local_experts": 8, "n_group": 1}
    both = [
        resolved(written(tmp_path, {"model_type": family, **TINY, "topk_group": 1, **keys}))
        for family, keys in (("kimi_k2", hub), ("deepseek_v3", now))
    ]
    assert both[0] == both[1]
    assert both[0]["attention"]["rope"]["theta"] == 5e4


ON_THE_HUB: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"experts_per_token": 2, "initial_context_length": 4096},
    "qwen3_moe": {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
    "minimax_m2": {
        **{"shared_moe_mode": "sigmoid", "mlp_intermediate_size": 8192, "layernorm_mlp_beta": 1.0},
        **{"layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0},
    },
}
"""Keys that files on the hub have and ``transformers`` does not read: of gpt-oss, Qwen3-Coder-480B and MiniMax-M2."""


@pytest.mark.parametrize("family", ON_THE_HUB)
def test_keys_that_only_the_hub_has_change_nothing(family: str, tmp_path: Path) -> None:
    plain = resolved(written(tmp_path, {"model_type": family, **TINY}))
    assert resolved(written(tmp_path, {"model_type": family, **TINY, **ON_THE_HUB[family]})) == plain


@pytest.mark.parametrize("below", range(5))
def test_qwen2_windows_are_in_the_layers_where_transformers_has_them(below: int, tmp_path: Path) -> None:
    import transformers

    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": below}
    said = {**TINY, "num_hidden_layers": 4, "num_key_value_heads": 2, **windows}
    transformers.Qwen2MoeConfig(**said).save_pretrained(tmp_path / "saved")
    assert "layer_types" in json.loads((tmp_path / "saved" / "config.json").read_text())
    found = resolved(written(tmp_path, {"model_type": "qwen2_moe", **said}))["attention"]
    saved = resolved(f"{tmp_path}/saved")["attention"]
    assert [found[key] for key in ("window", "full_layers")] == [saved[key] for key in ("window", "full_layers")]


def test_a_spec_may_say_otherwise_than_a_configuration(tmp_path: Path) -> None:
    path = written(tmp_path, {"model_type": "qwen3_moe", **TINY})
    found = resolved(path, model={"num_layers": 5}, attention={"qkv_bias": True}, routing={"jitter": 0.1})
    assert (found["model"]["num_layers"], found["model"]["dim"]) == (5, 32)
    assert (found["attention"]["qkv_bias"], found["attention"]["num_heads"]) == (True, 4)
    assert (found["routing"]["jitter"], found["routing"]["pre_softmax"]) == (0.1, True)


def test_another_attention_takes_no_options_of_the_configurations(tmp_path: Path) -> None:
    found = resolved(written(tmp_path, {"model_type": "qwen3_moe", **TINY}), attention={"use": "mla", "num_heads": 2})
    assert (found["attention"]["use"], found["attention"]["num_heads"]) == ("mla", 2)


@pytest.mark.parametrize("key", sorted(NEUTRAL - {"model_type"}))
def test_a_neutral_key_changes_nothing(key: str, tmp_path: Path) -> None:
    plain = resolved(written(tmp_path, {"model_type": "mixtral", **TINY}))
    assert resolved(written(tmp_path, {"model_type": "mixtral", **TINY, key: 7})) == plain


def test_every_option_that_is_not_supported_is_told_at_once(tmp_path: Path) -> None:
    odd = {"hidden_act": "gelu", "attention_dropout": 0.1, "router_jitter_noise": 0.2, "swiglu_limt": 3.0}
    odd |= {"output_router_logits": "aux"}
    found = complaints(tmp_path, "mixtral", **odd, rope_scaling={"rope_type": "dynamic"})
    assert len(found.splitlines()) == 6
    for key in (*odd, "RoPE of type 'dynamic'"):
        assert key in found


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_a_rope_that_is_not_supported_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    found = complaints(tmp_path, "qwen3_moe", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    assert f"RoPE of type '{kind}' is not supported. Supported: default, linear, llama3, yarn." in found


@pytest.mark.parametrize(
    ("family", "values", "says"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8}, "num_experts 4 contradicts num_local_experts 8"),
        ("qwen3_moe", {"hidden_size": None}, "hidden_size is missing"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size 8 is not supported"),
        ("qwen3_moe", {"qkv_bias": True}, "qkv_bias True is not supported. Supported: False."),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
        ("gpt_oss", {"experts_per_token": 4}, "experts_per_token 4 contradicts num_experts_per_tok 2."),
        ("minimax_m2", {"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta 3.5 is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported. Supported: 'sigmoid'."),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("mixtral", {"rope_parameters": {"rope_type": "linear", "fctor": 2.0}}, "fctor is no option of RoPE of type"),
        ("olmoe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        (
            "glm4_moe",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.5 contradicts that of rope_parameters, 0.25.",
        ),
        ("glm4_moe", {"partial_rotary_factor": 0.4}, "of head_dim 8 3 values turn"),
        ("minimax_m2", {"rotary_dim": 10}, "rotary_dim 10 is more than head_dim 8."),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list has layers with another attention."),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported. Supported: False."),
        ("gpt_os", {}, "models of type 'gpt_os' cannot be read. Did you mean 'gpt_oss'?"),
        ("gpt_oss", {"num_attention_heads": 3, "num_key_value_heads": 2}, "3 heads cannot share 2 key-value heads"),
    ],
)
def test_a_configuration_that_cannot_be_read_says_why(
    family: str, values: dict[str, Any], says: str, tmp_path: Path
) -> None:
    assert says in complaints(tmp_path, family, **values)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "config.json cannot be read: No such file or directory."),
        ("{", "config.json is not JSON"),
        ("[1]", "config.json holds no mapping"),
        ("[" * 100_000, "config.json is not JSON"),
        (" " * (1 << 24) + "{}", r"config.json cannot be read: It has 16,777,218 bytes, and may have 16,777,216\."),
    ],
    ids=["none", "torn", "a list", "deep", "large"],
)
def test_a_file_that_is_no_configuration_is_named(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(MoefwError, match=says):
        resolved(f"{tmp_path}/config.json")


def test_a_folder_beside_the_spec_needs_no_slash_and_the_name_of_a_preset_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tuned", "mixtral-8x7b-tiny"):
        Path(name).mkdir()
        written(Path(name), {"model_type": "mixtral", **TINY})
    assert resolved("tuned") == resolved("./tuned")
    assert resolved("mixtral-8x7b-tiny") != resolved("./mixtral-8x7b-tiny")


def test_an_unknown_preset_names_those_that_are_near() -> None:
    with pytest.raises(MoefwError, match=r"decoder has no preset 'deepseek-v4'\. Did you mean 'deepseek-v3'"):
        resolved("deepseek-v4")


@pytest.mark.parametrize("option", ["limit", "alpha"])
def test_an_activation_that_clamps_nothing_takes_no_limit(option: str) -> None:
    with pytest.raises(MoefwError, match=f"{option} is no option of swiglu, which clamps nothing"):
        resolved("qwen3-moe-tiny", model={"activation": {option: 2.0}})


def test_a_gemm_that_lacks_the_activation_is_refused_by_name() -> None:
    from broken_gemms import Plain
    from moefw.testing.announce import with_plugins

    tree = {"model": {"preset": "gpt-oss-20b-tiny"}, "run": {"device": "cpu"}, "gemm": {"use": "plain"}}
    with pytest.raises(MoefwError) as caught:
        assemble_tree(
            tree, Marks("spec"), defaults=defaults(), machine=Machine(device="cpu"), registry=with_plugins((Plain,))
        )
    told = [problem.what for problem in caught.value.problems]
    assert told == [
        "decoder needs experts with clamped_swiglu: the activation of the model is clamped_swiglu; plain offers swiglu.",
        "decoder needs experts with bias: the experts of the model have biases; plain offers swiglu.",
    ]
