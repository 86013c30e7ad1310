"""Marks tensors that are made of weights once for all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_making: ContextVar[bool] = ContextVar("making", default=False)


@contextmanager
def made_for_step() -> Iterator[None]:
    """Mark tensors that are created in this block."""
    before = _making.set(True)
    try:
        yield
    finally:
        _making.reset(before)


def is_made_for_step() -> bool:
    """Return whether tensors that are created now are marked."""
    return _making.get()
