"""The built-in attentions compute what those of ``transformers`` do, outputs and every gradient."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attrs import field, frozen
from torch import Tensor

from moefw.core.stages import Batch
from moefw.runtime.attention.rope import frequencies
from moefw.runtime.attention.rope_options import Rope
from moefw.testing.suites.runs import open_model, whole_model

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GQA = {"use": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": "none"}
MLA = {"use": "mla", "num_heads": 4, "q_rank": 10, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "v_dim": 5}
LATENT = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENT |= {"num_attention_heads": 4, "num_key_value_heads": 4}
YARN = {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0}
NAMES = {
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "sinks.weight": "sinks",
}
DIM, SEQUENCES, POSITIONS = 32, 2, 24


@frozen
class Case:
    """An attention of ours, and the one of ``transformers`` that it equals; ``rope`` in its words."""

    family: str
    prefix: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]
    rope: Mapping[str, Any] = field(factory=dict)
    names: Mapping[str, str] = field(factory=dict)
    window: int | None = None


def mla(rope: Mapping[str, Any], theirs: Mapping[str, Any], **given: Any) -> Case:
    return Case("deepseek_v3", "DeepseekV3", MLA | {"rope": {"pairs": "neighbours", **rope}} | given, LATENT, theirs)


CASES = {
    "qwen3_moe": Case("qwen3_moe", "Qwen3Moe", GQA | {"qk_norm": "head"}, HEADS | {"head_dim": 8}),
    "qwen3_moe, biases, one key head": Case(
        "qwen3_moe",
        "Qwen3Moe",
        GQA | {"qk_norm": "head", "num_kv_heads": 1, "qkv_bias": True, "out_bias": True},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "attention_bias": True},
    ),
    "qwen2_moe": Case("qwen2_moe", "Qwen2Moe", GQA | {"qkv_bias": True}, HEADS),
    "mixtral, window": Case("mixtral", "Mixtral", GQA | {"window": 7}, HEADS | {"sliding_window": 7}, window=7),
    "mixtral, linear": Case(
        "mixtral",
        "Mixtral",
        GQA | {"rope": {"kind": "linear", "factor": 3.0}},
        HEADS,
        {"rope_type": "linear", "factor": 3.0},
    ),
    "mixtral, llama3": Case(
        "mixtral",
        "Mixtral",
        GQA | {"rope": {"kind": "llama3", "factor": 8.0, "trained_positions": 32}},
        HEADS,
        {
            **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
    "olmoe": Case("olmoe", "Olmoe", GQA | {"qk_norm": "all", "clip": 1.5, "norm_eps": 1e-5}, HEADS | {"clip_qkv": 1.5}),
    "gpt_oss, window and sinks": Case(
        "gpt_oss",
        "GptOss",
        GQA
        | {"sinks": True, "qkv_bias": True, "out_bias": True, "window": 5}
        | {"rope": {"kind": "yarn", "trained_positions": 16, "truncate": False, **YARN}},
        HEADS | {"head_dim": 8, "sliding_window": 5},
        {"rope_type": "yarn", "original_max_position_embeddings": 16, "truncate": False, **YARN},
        window=5,
    ),
    "deepseek_v3": mla({}, {}),
    "deepseek_v3, yarn": mla(
        {"kind": "yarn", "trained_positions": 16, "mscale": 1.0, "mscale_all_dim": 0.7, **YARN},
        {"rope_type": "yarn", "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7, **YARN},
    ),
}


def theirs(case: Case, weights: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Return their attention with our weights, and their rotary positions."""
    modeling = importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
    configuration = getattr(importlib.import_module(f"transformers.models.{case.family}"), f"{case.prefix}Config")
    rope = {"rope_type": "default", "rope_theta": 10000.0, **case.rope}
    config = configuration(hidden_size=DIM, rope_parameters=rope, max_position_embeddings=64, **case.theirs)
    config._attn_implementation = "eager"
    attention = getattr(modeling, f"{case.prefix}Attention")(config, 0)
    attention.load_state_dict(weights)
    return attention, getattr(modeling, f"{case.prefix}RotaryEmbedding")(config)


def their_name(name: str) -> str:
    for ours, other in NAMES.items():
        name = name.replace(ours, other)
    return name


def documents() -> tuple[Tensor, Tensor]:
    """Return documents of 3 to 14 tokens, and positions that restart with each."""
    lengths = torch.tensor([[10, 14, 0], [3, 7, 14]])
    numbers = torch.stack([torch.arange(3).repeat_interleave(each) for each in lengths])
    positions = torch.stack([torch.cat([torch.arange(int(each)) for each in row]) for row in lengths])
    return numbers, positions


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize(("theta", "trained"), [(1e4, 16), (1e4, 4096), (1e4, 131072), (100.0, 131072)])
def test_frequencies_of_yarn_are_those_of_transformers(theta: float, trained: int, truncate: bool) -> None:
    """Blended up to a pair in the middle, behind the last one, and behind twice as many, where the blend ends."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    width = 16
    parameters = {"rope_theta": theta, "original_max_position_embeddings": trained, "truncate": truncate, **YARN}
    config = LlamaConfig(head_dim=width, rope_parameters={"rope_type": "yarn", **parameters})
    wanted, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = Rope(kind="yarn", theta=theta, trained_positions=trained, truncate=truncate, **YARN)
    torch.testing.assert_close(frequencies(rope, width, torch.device("cpu")), wanted)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_those_of_transformers(case: Case, packed: bool) -> None:
    model, *_ = open_model(
        whole_model(1, parts={"attention": case.ours}, plugins=(), sizes={"dim": DIM, "num_layers": 1})
    )
    ours: Any = model.layers[0].attention  # type: ignore[index, union-attr]
    generator = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    x_BSD, probe_BSD = torch.randn(2, SEQUENCES, POSITIONS, DIM, generator=generator)
    numbers_BS, positions_BS = documents()
    if not packed:
        numbers_BS, positions_BS = torch.zeros_like(numbers_BS), torch.arange(POSITIONS).expand_as(positions_BS)
    ids = torch.zeros(SEQUENCES, POSITIONS, dtype=torch.int64)
    given = {"documents_BS": numbers_BS, "positions_BS": positions_BS} if packed else {}
    batch = Batch(ids_BS=ids, labels_BS=ids, **given)
    attention, rotary = theirs(case, {their_name(name): one.detach() for name, one in ours.named_parameters()})
    distance = torch.arange(POSITIONS).unsqueeze(1) - torch.arange(POSITIONS)
    seen = (
        (distance >= 0) & (distance < (case.window or POSITIONS)) & (numbers_BS.unsqueeze(2) == numbers_BS.unsqueeze(1))
    )
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).unsqueeze(1)

    x, other = x_BSD.clone().requires_grad_(), x_BSD.clone().requires_grad_()
    out = ours(x.flatten(0, 1), ours.tables(batch), batch).view_as(x)
    wanted = attention(other, position_embeddings=rotary(other, positions_BS), attention_mask=mask)[0]
    (out * probe_BSD).sum().backward()
    (wanted * probe_BSD).sum().backward()

    def close(found: Tensor, expected: Tensor) -> None:
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()

    close(out, wanted)
    close(x.grad, other.grad)  # type: ignore[arg-type]
    grads = {name: parameter.grad for name, parameter in attention.named_parameters()}
    for name, parameter in ours.named_parameters():
        close(parameter.grad, grads.pop(their_name(name)))
    assert not grads
