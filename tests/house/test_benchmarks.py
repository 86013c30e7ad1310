"""Benchmarks are not tests, but they must run: code that nobody runs breaks unnoticed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_layer_written_by_hand_computes_what_the_plugins_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin tax benchmark compares both, bit for bit, before it measures."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    plugin_tax = importlib.import_module("plugin_tax")
    seconds = plugin_tax.race(16, 16, rounds=1)
    assert {name: len(each) for name, each in seconds.items()} == {"built": 1, "inline": 1, "inline again": 1}


def test_only_scales_that_are_rounded_up_leave_block_maxima_of_nvfp4_without_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    nvfp4_bias = importlib.import_module("nvfp4_bias")
    x = nvfp4_bias.one_large_in_16(64)
    nearest, up = (nvfp4_bias.measure(x, scales, 32) for scales in ("nearest", "up"))
    assert nearest["block_maxima"] < -0.008
    assert abs(up["block_maxima"]) < 0.003


def test_dropped_rows_leave_the_tokens_and_the_pre_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved bytes benchmark compares the results of its modes, and counts the live bytes of each."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    saved_bytes = importlib.import_module("saved_bytes")
    shape = {"tokens": 64, "dim": 512, "expert_dim": 256, "experts": 8, "top_k": 4}
    held = {row["mode"]: row["of_minimum"] for row in saved_bytes.measure(shape, rounds=1)}
    rows = 2 * 4 * 512 / (2 * 512 + 4 * 4 * 256)
    assert held["recompute dispatch and router"] < held["recompute dispatch"] < held["keep"] < held[saved_bytes.PEER]
    assert held["recompute dispatch and router"] < 1.02
    assert held["keep"] - held["recompute dispatch"] == pytest.approx(rows, abs=0.02)
