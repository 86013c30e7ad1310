"""Defaults of a spec: ``defaults.yaml``, read once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from moefw.compose.spec.source import Marks, Tree, read_yaml

DEFAULTS = Path(__file__).with_suffix(".yaml")


@cache
def defaults() -> Tree:
    """Defaults as plain data, which callers must not change."""
    return read_yaml(DEFAULTS.read_text(encoding="utf-8"), Marks(DEFAULTS.name), [])
