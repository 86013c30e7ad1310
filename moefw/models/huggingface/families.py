"""The families of models that can be read, by ``model_type``."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moefw.core.errors import SpecError, nearest
from moefw.models.huggingface import (
    deepseek_v2,
    deepseek_v3,
    dense,
    glm4_moe,
    gpt_oss,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from moefw.models.huggingface.config import Keys, read_config
from moefw.models.huggingface.origins import Family

FAMILIES: Final[Mapping[str, Family]] = {
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "kimi_k2": deepseek_v3.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "mixtral": mixtral.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    **dense.FAMILIES,
}


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """Family of the configuration in ``path``. Raises SpecError if it is unknown."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        what = f"{path}: models of type {reprlib.repr(name)} cannot be read."
        raise SpecError(what, nearest(name if isinstance(name, str) else "", FAMILIES))
    return FAMILIES[name]


def sections_of(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Sections of a spec that describe the model of a configuration, with the tokenizer that lies beside it.

    Raises SpecError with every key that is not supported.
    """
    values = read_config(path)
    keys = Keys(values, str(path))
    sections = dict(family_of(values, path).sections(keys))
    keys.raise_problems()
    tokenizer = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if os.path.lexists(tokenizer):
        sections["data"] = {"use": "text", "tokenizer": str(tokenizer)}
    return sections
