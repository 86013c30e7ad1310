"""Fixtures that tests of runs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from small_spec import small_spec


@pytest.fixture
def write_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return :func:`small_spec` for the folder of a test, in which its runs also prepare their text."""
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    return lambda **options: small_spec(tmp_path, **options)
