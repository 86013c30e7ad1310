"""Presets at true size, on tensors without memory: their parameters are those that are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import CLASSES
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble, assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.models.presets import PUBLISHED
from moefw.planner import ledger

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepseek-v3.yaml"
PARAMETERS = {
    "deepseek-v2": "236",
    "deepseek-v2-lite": "15.7",
    "deepseek-v3": "671",
    "glm-4.5": "353",
    "glm-4.5-air": "107",
    "minimax-m2": "229",
    "kimi-k2": "1026",
    "qwen3-235b-a22b": "235",
    "qwen3-30b-a3b": "30.5",
    "qwen2-57b-a14b": "57.4",
    "mixtral-8x7b": "46.7",
    "mixtral-8x22b": "141",
    "olmoe-1b-7b": "6.9",
    "gpt-oss-120b": "116.8",
    "gpt-oss-20b": "20.9",
}
"""Billions, as rounded by the authors; Kimi-K2 is said to have a trillion, GLM-4.5 355 and 106 billion."""


def assembled(name: str, **model: Any) -> Any:
    train = {"seq_len": 4096, "micro_batch": 1, "tokens_per_step": 4096}
    tree = {"model": {"preset": name, **model}, "precision": {"use": "bf16"}, "train": train, "run": {"device": "cpu"}}
    return assemble_tree(tree, Marks("preset"), defaults=defaults(), machine=Machine(device="cpu"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_parameters_that_transformers_gives_it(name: str) -> None:
    import transformers

    family, values = PUBLISHED[name]
    kind = CLASSES["deepseek_v3" if family == "kimi_k2" else family]
    assembly = assembled(name)
    with torch.device("meta"):
        model = build_model(assembly, open_layout(assembly, "cpu"), torch.device("meta"), Shared())
        config = getattr(transformers, f"{kind}Config")(**values)
        theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
    digits = len(PARAMETERS[name].partition(".")[2])
    assert f"{count / 1e9:.{digits}f}" == PARAMETERS[name]


def test_the_example_of_deepseek_v3_fits_on_its_gpus() -> None:
    assembly = assemble(EXAMPLE, defaults=defaults(), world=512, machine=Machine(device="cpu"))
    found = ledger(assembly)
    assert found.peak_bytes is not None
    assert found.peak_bytes < 80e9
    assert 512 * found.held.parameters == pytest.approx(4 * 682.64e9, rel=0.001)
