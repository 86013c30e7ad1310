"""Uninitialised memory filled with NaN, so that tests detect reads of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN inside this context; nondeterministic operations raise."""
    # torch.use_deterministic_algorithms sets the same switch, and imports the compiler for it: a second.
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
