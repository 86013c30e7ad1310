"""Benchmarks are no tests, but they must run: what nobody runs breaks unseen."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_the_layer_written_by_hand_computes_what_the_plugins_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race of the plugin tax holds one against the other, bit for bit, before it begins."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    plugin_tax = importlib.import_module("plugin_tax")
    seconds = plugin_tax.race(16, 16, rounds=1)
    assert {name: len(each) for name, each in seconds.items()} == {"built": 1, "inline": 1, "inline again": 1}
