"""Models of ``moefw.from_pretrained`` with drawn adapters, the same ones in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moefw
from moefw.runtime.naming import by_parameter, canonical_parameters, draw
from moefw.runtime.parallel.local_shards import local, stored, whole

LORA = {"use": "lora", "rank": 8, "alpha": 4.0}


def adapted(folder: Path, adapter: Mapping[str, Any] = LORA, **sections: Any) -> moefw.Pretrained:
    """A model with random adapters, in evaluation mode. Magnitudes are near those of the weights."""
    model = moefw.from_pretrained(folder, adapter=adapter, **sections)
    with torch.no_grad():
        for parameter, pieces in by_parameter(model.module):
            if not pieces[0].of_adapter:
                continue
            values = whole(parameter.detach()).clone()
            for piece in pieces:
                part = piece.of(values)
                drawn = draw(piece.name, piece.shard.whole(part.shape) if piece.shard else part.shape, 0.05, seed=1)
                drawn = piece.shard.of(drawn) if piece.shard else drawn
                part.copy_(part * (1 + drawn) if piece.name.endswith("lora_magnitude") else drawn)
            local(parameter).copy_(stored(parameter, values))
    return model.eval()


def tensors_of_adapter(model: moefw.Pretrained) -> dict[str, Tensor]:
    """The tensors of a model's adapters on a single rank, by our names."""
    return {
        piece.name: piece.of(piece.parameter.detach())
        for piece in canonical_parameters(model.module)
        if piece.of_adapter
    }
