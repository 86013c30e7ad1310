"""Operations a token of models at true size: within half a percent of published TFLOPS over tokens/s."""

from __future__ import annotations

import importlib
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from pairwise import quick

ROOT = Path(__file__).parents[2]
MODELS = (
    "DeepSeek-V3, one MTP layer",
    "DeepSeek-V3",
    "Kimi-K2",
    "Qwen3-235B-A22B",
    "Qwen3-30B-A3B",
    "gpt-oss-120b",
    "gpt-oss-120b, as counted before 26.06",
    "gpt-oss-120b, 8,192 tokens, as counted before 26.06",
    "Mixtral-8x22B",
    "Qwen2-57B-A14B",
)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("operations")


def test_every_model_is_named_here(operations: Any) -> None:
    assert tuple(model.name for model in operations.MODELS) == MODELS


@pytest.mark.parametrize("name", quick(MODELS, "Qwen3-30B-A3B", "Mixtral-8x22B"))
def test_a_token_takes_the_operations_that_are_published(operations: Any, name: str) -> None:
    (model,) = (each for each in operations.MODELS if each.name == name)
    figures = model.figures()
    expected = median(figures) if figures else operations.FORMULA[name]
    flops = operations.giga_flops(model)
    assert flops == pytest.approx(expected, rel=0.005)
    assert operations.table_row(model, flops) in (ROOT / "docs" / "operations.md").read_text()


LAYOUTS = (
    "DeepSeek-V3, one MTP layer: 256 ranks, PP4 in 4 chunks, EP64, mxfp8",
    "Qwen3-235B-A22B: 256 ranks, TP2, PP8, EP32, FP8 in blocks",
    "gpt-oss-120b: 64 ranks, PP4, EP16, layers sharded",
)


@pytest.mark.deep
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_a_recipe_and_a_dispatcher_change_nothing(operations: Any, name: str) -> None:
    model, world, spec = operations.LAYOUTS[name]
    assert operations.giga_flops(model, world, **spec) == pytest.approx(operations.giga_flops(model), rel=0.001)
