"""The fake ``deep_ep`` in place of the library, for a test that uses the fixture and the ranks that it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKES = str(Path(__file__).parents[1] / "fakes")


@pytest.fixture
def fake_deep_ep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``import deep_ep`` find the fake, and forget it after the test."""
    monkeypatch.syspath_prepend(FAKES)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_ep"]:
        del sys.modules[name]
