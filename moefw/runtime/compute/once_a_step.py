"""Marks work that is done once for all micro-batches of a step, and the tensors that it makes of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_making: ContextVar[bool] = ContextVar("making", default=False)
_once: ContextVar[bool] = ContextVar("once", default=False)


@contextmanager
def _set(mark: ContextVar[bool]) -> Iterator[None]:
    before = mark.set(True)
    try:
        yield
    finally:
        mark.reset(before)


@contextmanager
def made_for_step() -> Iterator[None]:
    """Mark tensors that are created in this block, and its work."""
    with _set(_making), _set(_once):
        yield


@contextmanager
def done_for_step() -> Iterator[None]:
    """Mark the work in this block, whose tensors are temporary."""
    with _set(_once):
        yield


def is_made_for_step() -> bool:
    """Whether tensors that are created now are marked."""
    return _making.get()


def is_done_for_step() -> bool:
    """Whether work that is done now is marked."""
    return _once.get()
