"""Folders of small models of ``transformers`` in FP8, MXFP4 and NVFP4."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_models import MODELS, SIZES, tensors_of, theirs

EIGHT_BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 256}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {**EIGHT_BLOCKS, "num_experts": 4, "num_attention_heads": 2, "head_dim": 128},
    "deepseek_v3": {**EIGHT_BLOCKS, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "mixtral": {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4},
}
"""Sizes of whole blocks, for two ranks, too."""


def save_fp8(family: str, path: Path, **sizes: Any) -> None:
    """Save a model whose matrices of attention, MLPs and experts are in FP8, as DeepSeek and Qwen do."""
    _save(family, path, sizes, _in_fp8)


def save_mxfp4(path: Path, **sizes: Any) -> None:
    """Save a model of gpt-oss whose experts are in MXFP4."""
    _save("gpt_oss", path, sizes, _in_mxfp4)


def save_nvfp4(family: str, path: Path, **sizes: Any) -> None:
    """Save a model whose matrices of attention, MLPs and experts are in NVFP4, as ``compressed-tensors`` does."""
    _save(family, path, sizes, _in_nvfp4)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (path / "config.json").write_text(json.dumps(config))


def _save(
    family: str,
    path: Path,
    sizes: Mapping[str, Any],
    coded: Callable[[str, Tensor, torch.Generator], Mapping[str, Tensor]],
) -> None:
    model = theirs(family, {**SIZES, "vocab_size": 256, **MODELS[family], **FAMILIES[family], **sizes}).to(
        torch.bfloat16
    )
    for name, tensor in model.named_buffers():
        if "correction_bias" in name:
            tensor.data = tensor.data.float()
    model.save_pretrained(path)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors_of(path).items()):
        tensors |= coded(name, tensor, generator)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def _in_fp8(name: str, tensor: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
    if tensor.ndim != 2 or (not name.endswith("_proj.weight") and "_a_proj" not in name):
        return {name: tensor}
    blocks = [-(-size // 128) for size in tensor.shape]
    scales = 0.01 + 0.01 * torch.rand(blocks, generator=generator)
    of_values = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
    return {name: (tensor.float() / of_values).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def _in_mxfp4(name: str, tensor: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, inputs, outputs = tensor.shape
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def nvfp4(out_dim: int, in_dim: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random codes, scales and divisor of a matrix, by the ends of their names. Values are about 0.1."""
    scales = 32 + 400 * torch.rand((out_dim, in_dim // 16), generator=generator)
    return {
        "_packed": torch.randint(256, (out_dim, in_dim // 2), generator=generator, dtype=torch.uint8),
        "_scale": scales.to(torch.float8_e4m3fn),
        "_global_scale": 4000 + 4000 * torch.rand(1, generator=generator),
    }


def _in_nvfp4(name: str, tensor: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
    is_linear = name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")) or "_a_proj" in name
    if not is_linear or tensor.ndim != 2 or tensor.shape[1] % 16:
        return {name: tensor}
    coded = {f"{name}{end}": part for end, part in nvfp4(*tensor.shape, generator).items()}
    return {**coded, f"{name.removesuffix('weight')}input_global_scale": torch.ones(1)}
