"""Small models of ``transformers``, adapters of them with drawn values, and what merging one into a base must give."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

import moefw
from hf_models import MODELS, SIZES, theirs
from moefw.models.huggingface.adapter_config import AdapterConfig
from moefw.models.huggingface.adapter_folder import AdapterFolder
from moefw.models.huggingface.adapter_places import DENSE, EXPERT
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.families import family_of
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.loading import placed, wanted

RANK, EXPERTS, LAYERS = 3, 8, 2
OWN: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 12, "mlp_only_layers": [0]},
    "qwen2_moe": {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]},
    "mixtral": {"intermediate_size": 12},
    "olmoe": {"intermediate_size": 12},
    "gpt_oss": {"intermediate_size": 12},
    "deepseek_v3": {"moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1},
}
"""Sizes that all differ, also doubled, and from the rank: no transposed tensor fits."""
Values = dict[str, Tensor]


@frozen(eq=False)
class Base:
    """A saved model: its family, its folder, and its weights by our names."""

    family: str
    path: Path
    weights: Values

    def fresh(self) -> Any:
        """Return the model as transformers loads it, to be changed."""
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype="float32")

    def adapter(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> AdapterFolder:
        """Return the reader of an adapter of this base."""
        shapes = {name: tuple(weight.shape) for name, weight in (weights or self.weights).items()}
        return AdapterFolder(folder, shapes, model_type=self.family, num_layers=LAYERS)


def saved_base(family: str, path: Path) -> Base:
    """Return a model with drawn weights, saved in ``path``."""
    sizes = {**SIZES, **MODELS.get(family, {}), "hidden_size": 40, "intermediate_size": 28, **OWN.get(family, {})}
    if family not in MODELS:
        del sizes["num_experts_per_tok"]
    theirs(family, sizes).save_pretrained(path)
    return Base(family, path, weights_of(path))


def weights_of(path: Path) -> Values:
    """Return the weights of linear layers in a folder, by our names."""
    model: Any = moefw.from_pretrained(path, gemm={"use": "loop"}).module
    folder = Folder(path)
    origins, _ = placed(model, folder, family_of(read_config(path), path).rules, num_experts=EXPERTS)
    linear = (name for name, _ in wanted(model) if DENSE.fullmatch(name[:-7]) or EXPERT.fullmatch(name[:-7]))
    return {name: folder.read(origins[name]).clone() for name in linear}


def drawn(weights: Values, pattern: str, *, dora: bool = False, rank: int = RANK) -> Values:
    """Return drawn tensors of an adapter of the weights whose names match ``pattern``."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in weights.items():
        linear = name.removesuffix(".weight")
        if re.fullmatch(pattern, linear):
            outputs, inputs = weight.shape
            shared = re.sub(r"(?<=experts)(\.\d+)\.(gate|up)_proj", r"\1.gate_up_proj", linear)
            shapes |= {f"{shared}.lora_A": (rank, inputs), f"{linear}.lora_B": (outputs, rank)}
            if dora and "experts." not in linear:
                shapes[f"{linear}.lora_magnitude"] = (outputs,)
    return {name: torch.rand(shape, generator=generator) + 0.1 for name, shape in shapes.items()}


def merged(weights: Values, adapter: Values, config: AdapterConfig) -> Values:
    """Return the weights with an adapter in them, by the formulas of the papers, matrix by matrix."""
    return {name: _merged(name.removesuffix(".weight"), weight, adapter, config) for name, weight in weights.items()}


def _merged(linear: str, weight: Tensor, adapter: Values, config: AdapterConfig) -> Tensor:
    if f"{linear}.lora_B" not in adapter:
        return weight
    shared = re.sub(r"(?<=experts)(\.\d+)\.(gate|up)_proj", r"\1.gate_up_proj", linear)
    scale = config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)
    changed = weight + scale * adapter[f"{linear}.lora_B"] @ adapter[f"{shared}.lora_A"]
    if not config.dora:
        return changed
    return adapter[f"{linear}.lora_magnitude"].unsqueeze(1) * changed / changed.norm(dim=1, keepdim=True)


def close(one: Values, other: Values) -> bool:
    """Return whether weights are the same within 1e-6 of their largest magnitude."""
    return one.keys() == other.keys() and all(
        (one[name] - other[name]).abs().max() <= 1e-6 * other[name].abs().max() for name in one
    )


def read_all(adapter: AdapterFolder) -> Values:
    """Return all tensors of an adapter."""
    with adapter.reading() as read:
        return {name: read(name).clone() for name in adapter.shapes}
