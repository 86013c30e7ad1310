"""Whole layers with ``backend: te`` are those of ``emulate``, over a fake of the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen

import moefw
from moefw.core.site import Site
from moefw.testing.layer_case import LayerCase, Outcome, solve
from outcomes import assert_near
from te_recipes import PLUGINS, RECIPES


def run(recipe: str, backend: str, parts: Mapping[str, Any] | None = None, **given: Any) -> Outcome:
    """Run one MoE layer forward and backward in bf16."""
    use, options = RECIPES[recipe]
    declared = PLUGINS[use]
    if backend == "te":
        declared = HERE[use]
    precision = {"use": declared.name, "backend": backend, **options}
    alignment = 128 if use in ("fp8-blockwise", "nvfp4") else declared.rows
    plugins = (declared,) if backend == "te" else ()
    return solve(
        LayerCase(
            parts={"precision": precision, **(parts or {})}, plugins=plugins, row_alignment=alignment, top_k=3, **given
        )
    )


def here(plugin: type[Any]) -> type[Any]:
    """Return the plugin without its needs of the machine."""

    @frozen(kw_only=True)
    class Here(plugin):
        name: ClassVar[str] = f"{plugin.name}-here"

        def needs(self, site: Site) -> Sequence[moefw.Need]:
            machine = ("device", "capability", "package")
            return [need for need in super().needs(site) if need.fact not in machine]

    return Here


HERE = {use: here(plugin) for use, plugin in PLUGINS.items()}
LAYERS: dict[str, dict[str, Any]] = {
    "whole blocks": {"tokens": (40,), "dim": 128, "expert_dim": 128, "shared": True},
    "experts without rows, tokens masked": {"tokens": (6,), "dim": 128, "expert_dim": 128, "num_experts": 8, "masked": True},
    "sizes that are no blocks": {"tokens": (40,), "dim": 96, "expert_dim": 72, "shared": True, "skew": "one"},
    "a budget of rows": {
        "tokens": (40,), "dim": 128, "expert_dim": 128,
        "parts": {"dispatch": {"use": "hybridep", "backend": "torch", "rank_capacity": 2.0, "on_overflow": "drop"}},
    },
    "no token": {"tokens": (0,), "dim": 128, "expert_dim": 128},
    "recomputed": {
        "tokens": (20,), "dim": 128, "expert_dim": 128,
        "parts": {"memory": [{"use": "recompute", "regions": ["experts"]}]},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layer", "gemm"),
    [
        *((name, "whole blocks", "grouped") for name in RECIPES),
        *(("mxfp8", layer, "grouped") for layer in LAYERS if layer != "whole blocks"),
        *((name, "sizes that are no blocks", "loop") for name in ("mxfp8", "delayed")),
    ],
)
def test_a_layer_computes_what_emulation_computes(te: Any, name: str, layer: str, gemm: str) -> None:
    """Both round rows to bf16 in the same places; sums in another order round a few of them to the neighbour."""
    case = {**LAYERS[layer], "parts": {"gemm": {"use": gemm}, **LAYERS[layer].get("parts", {})}}
    wanted, got = run(name, "emulate", **case), run(name, "te", **case)
    grouped = {call for call, _ in te.CALLS} >= {"general_grouped_gemm"}
    assert grouped == (gemm == "grouped" and layer != "no token")
    assert torch.equal(got.tokens_per_expert, wanted.tokens_per_expert)
    assert_near(got, wanted, rtol=5e-3)
