"""The families of models that can be read, by ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moefw.core.errors import SpecError, nearest
from moefw.models.huggingface import deepseek_v3, dense, gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe
from moefw.models.huggingface.config import Keys, read_config
from moefw.models.huggingface.origins import Family

FAMILIES: Final[Mapping[str, Family]] = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "kimi_k2": deepseek_v3.FAMILY,
    "mixtral": mixtral.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    **dense.FAMILIES,
}


def sections_of(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return what a configuration says in a spec, and which tokenizer lies beside it.

    Raises SpecError with every key that is not supported.
    """
    values = read_config(path)
    keys = Keys(values, str(path))
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        what = f"{path}: models of type {values.get('model_type')!r} cannot be read."
        raise SpecError(what, nearest(str(values.get("model_type")), FAMILIES))
    sections = dict(family.sections(keys))
    keys.raise_problems()
    tokenizer = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return sections | ({"data": {"use": "text", "tokenizer": str(tokenizer)}} if tokenizer.is_file() else {})
