"""A fake Transformer Engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moefw.plugins.precision.quantized.gpus import Gpus
from moefw.plugins.precision.quantized.te import library

FAKES = str(Path(__file__).parents[1] / "fakes")


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fake Transformer Engine and GPU."""
    monkeypatch.syspath_prepend(FAKES)
    fake = importlib.import_module("fake_te")
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(library, "version", lambda name: "2.20.2")
    monkeypatch.setattr(Gpus, "require", lambda gpus, device: None)
    fake.CALLS.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield fake
    torch.set_num_threads(threads)
    fake.HOPPER[0] = True
