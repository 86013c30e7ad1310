"""Folders of small models of ``transformers`` in FP8 and MXFP4."""

from __future__ import annotations

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
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4},
}
"""Sizes of whole blocks, for two ranks, too."""


def save_fp8(family: str, path: Path, **sizes: Any) -> None:
    """Save a model whose matrices of attention, MLPs and experts are in FP8, as DeepSeek and Qwen do."""
    _save(family, path, sizes, _in_fp8)


def save_mxfp4(path: Path, **sizes: Any) -> None:
    """Save a model of gpt-oss whose experts are in MXFP4."""
    _save("gpt_oss", path, sizes, _in_mxfp4)


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
