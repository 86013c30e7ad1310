"""Fixtures that tests of runs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moefw.training import report
from small_spec import small_spec


@pytest.fixture(scope="session", autouse=True)
def _short_samples() -> Iterator[None]:
    """Let a run that ends write a short sample: that of a user takes longer than the training of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "SAMPLE_TOKENS", 4)
        yield


@pytest.fixture
def write_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return :func:`small_spec` for the folder of a test, in which its runs also prepare their text."""
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    return lambda **options: small_spec(tmp_path, **options)
