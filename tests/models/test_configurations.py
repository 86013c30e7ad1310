"""A configuration says all that it says, or is refused with every option that is not supported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.models.presets import PUBLISHED

PUBLIC = {
    "deepseek-v3": (671e9, 37e9),
    "kimi-k2": (1026e9, 33e9),
    "qwen3-235b-a22b": (235e9, 22e9),
    "qwen3-30b-a3b": (30.5e9, 3.3e9),
    "qwen2-57b-a14b": (57.4e9, 14.2e9),
    "mixtral-8x7b": (46.7e9, 12.9e9),
    "mixtral-8x22b": (140.6e9, 39.1e9),
    "olmoe-1b-7b": (6.9e9, 1.3e9),
    "gpt-oss-120b": (116.8e9, 5.1e9),
    "gpt-oss-20b": (20.9e9, 3.6e9),
}
"""Parameters of each model, and those that a token uses, as rounded by their authors."""


def assembled(preset: str) -> Any:
    tree = {"model": {"preset": preset}, "run": {"device": "cpu"}}
    return assemble_tree(tree, Marks("preset"), defaults=defaults(), machine=Machine(device="cpu"))


def written(folder: Path, values: Mapping[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return f"{folder}/config.json"


QWEN3 = {"model_type": "qwen3_moe", **PUBLISHED["qwen3-moe-tiny"][1]}
